"""DeltaNet: each token writes the difference between its value and what the state recalls under its key.

    S_t = S_{t-1} + b_t k_t (v_t - S_{t-1}^T k_t)^T,     b_t = sigmoid(w_b x_t)

Linear attention with an erase term: with b = 1 and a unit key, the old value under the key is replaced. Queries and
keys are L2-normalised after convolution and SiLU, the choice that won the paper's ablation; the output has an RMSNorm
per head and no gate. The published language models use heads of 128 channels (1.3B: 16 heads, width 2048).

Paper: Yang et al. 2024, arXiv:2406.06484; the rule: Schlag et al. 2021, arXiv:2102.11174.
Hub: fla-hub/delta_net-*.
"""

from deltazoo.spec import RuleSpec, register_rule

DELTA_NET = register_rule(
    RuleSpec(
        name="delta_net",
        paper="Parallelizing Linear Transformers with the Delta Rule, arXiv:2406.06484",
        summary="Linear attention that erases what it overwrites.",
        equation="S_t = (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T",
        step_size="euler",
        paper_shape={"learning_rate": 3e-4},
        hub_model_type="delta_net",
    )
)
