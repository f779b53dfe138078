"""Load a checkpoint with plain transformers and continue a prompt: ``python scripts/sample.py PATH``."""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import deltazoo  # noqa: F401  (makes our models known to transformers)

PROMPT = '''class Stack:
    """A last-in, first-out collection."""

    def __init__(self):
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=160)
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(arguments.path).to(device)
    tokenizer = AutoTokenizer.from_pretrained(arguments.path)
    inputs = tokenizer(arguments.prompt, return_tensors="pt", return_token_type_ids=False).to(device)
    torch.manual_seed(0)
    output = model.generate(**inputs, max_new_tokens=arguments.tokens, do_sample=True, temperature=0.7, top_p=0.95)
    print(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
