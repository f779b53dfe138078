"""Model cards, the Hub (replaced by a stand-in), checkpoints with code, and that no pickle is ever read."""

import json
import pickle
import re
import subprocess
import textwrap
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from fake_hub import Hub
from fresh_process import run_after_transformers
from peft import LoraConfig
from safetensors.torch import load_file
from tiny_families import swapped
from tiny_models import CONFIGS, HYBRID, tiny_model, tiny_named, tokens
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import LoadStateDictConfig

import deltazoo.models
from deltazoo.models import export_remote_code
from deltazoo.models.config_keys import HEADS, auto_class_name
from deltazoo.models.hub import CONFIG_CLASSES, model_class_of
from deltazoo.models.saving import make_model_card


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run_after_transformers(textwrap.dedent(code), *arguments)


class TestModelCard:
    @pytest.mark.parametrize("model_type", CONFIGS)
    def test_says_what_the_model_is(self, model_type):
        model = tiny_named(model_type, **HYBRID, training_data="A shelf of books.")
        model.add_model_tags(["books"])
        card = make_model_card(model, "me/mine")
        spec = model.config.spec
        for fact in (
            spec.summary,
            spec.equation,
            spec.paper,
            "A shelf of books.",
            f"# {spec.name} and softmax attention, {sum(p.numel() for p in model.parameters()):,} parameters",
            'AutoModelForCausalLM.from_pretrained("me/mine")',
        ):
            assert fact in card.text
        assert card.data.library_name == "deltazoo"
        assert card.data.pipeline_tag == "text-generation"
        assert {"deltazoo", "linear-attention", model_type, spec.name, "hybrid", "books"} <= set(card.data.tags)

    @pytest.mark.parametrize(
        ("suffix", "task"),
        [
            ("Model", "feature-extraction"),
            ("ForSequenceClassification", "text-classification"),
            ("ForTokenClassification", "token-classification"),
            ("ForQuestionAnswering", "question-answering"),
        ],
    )
    def test_names_the_task_and_its_auto_class(self, suffix, task):
        card = make_model_card(tiny_named("kda", suffix))
        assert card.data.pipeline_tag == task
        assert f"import AutoModel{suffix.removeprefix('Model')}\n" in card.text

    def test_a_softmax_model_claims_no_linear_layers(self):
        text = make_model_card(tiny_model("softmax_only")).text
        assert "gated_deltanet" not in text

    def test_is_written_on_saving(self, tmp_path):
        model = tiny_model("gated_deltanet")
        model.save_pretrained(tmp_path)
        assert "Not recorded." in (tmp_path / "README.md").read_text()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        loaded.config.training_data = "A shelf of {{ books }}."
        loaded.save_pretrained(tmp_path / "again")
        assert "A shelf of {{ books }}." in (tmp_path / "again" / "README.md").read_text()
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert again.config.training_data == "A shelf of {{ books }}."

    def test_never_replaces_one(self, tmp_path):
        (tmp_path / "README.md").write_text("# Mine\n")
        tiny_model("gated_deltanet").save_pretrained(tmp_path)
        assert (tmp_path / "README.md").read_text() == "# Mine\n"

    def test_only_the_writing_process_writes_it(self, tmp_path):
        tiny_model("gated_deltanet").save_pretrained(tmp_path, is_main_process=False)
        assert not (tmp_path / "README.md").exists()


class TestHub:
    @pytest.fixture
    def hub(self, monkeypatch):
        return Hub(monkeypatch)

    def test_push_uploads_a_model_that_comes_back(self, hub, tmp_path):
        model = tiny_named("kda")
        model.push_to_hub("me/mine", tags=["books"], max_shard_size="8KB", commit_message="First")
        ((repo_id, commit),) = hub.commits
        assert repo_id == "me/mine" and commit["commit_message"] == "First"
        card = hub.card()
        assert {"books", "kda"} <= set(card.data.tags) and '"me/mine"' in card.text
        assert all(name.endswith((".json", ".safetensors", ".md")) for name in hub.files)
        for name, content in hub.files.items():
            (tmp_path / name).write_bytes(content)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(tokens(1, 4)).logits, model(tokens(1, 4)).logits)

    def test_a_card_on_the_hub_stays(self, hub):
        model = tiny_model("gated_deltanet")
        hub.files["README.md"] = b"---\nlicense: mit\n---\n# Mine\n"
        model.push_to_hub("mine", tags=["books"])
        assert hub.card().data.to_dict() == {"license": "mit", "tags": ["books"]}
        assert hub.card().text.strip() == "# Mine"

    def test_save_and_push_uploads_only_what_was_saved(self, hub, tmp_path):
        folder = tmp_path / "mine"
        folder.mkdir()
        (folder / "diary.txt").write_text("private")
        (folder / "README.md").write_text("# Mine\n")
        tiny_model("gated_deltanet").save_pretrained(folder, push_to_hub=True, revision="draft", remote_code=True)
        assert hub.commits[0][0] == "me/mine" and hub.branches == ["draft"]
        assert set(hub.files) == {path.name for path in folder.iterdir()} - {"diary.txt"}
        assert hub.card().text.strip() == (folder / "README.md").read_text().strip() == "# Mine"

    def test_a_misspelt_argument_is_refused(self, hub):
        with pytest.raises(TypeError, match="unexpected argument 'commit_mesage'; did you mean 'commit_message'"):
            tiny_model("gated_deltanet").push_to_hub("mine", commit_mesage="First")
        assert not hub.commits

    def test_sharded_checkpoints_are_not_pushed(self, hub, tmp_path):
        with pytest.raises(ValueError, match="cannot be pushed"):
            tiny_model("hybrid").save_pretrained(tmp_path / "x", push_to_hub=True, distributed_checkpoint=True)
        assert not hub.commits and not (tmp_path / "x").exists()


WITHOUT_DELTAZOO = """
import sys
class Missing:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "deltazoo":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


class TestRemoteCode:
    def test_every_head_has_a_class(self):
        for head in HEADS:
            assert hasattr(transformers, auto_class_name(head))
            assert all(model_class_of(config, head).config_class is config for config in CONFIG_CLASSES)

    def test_loads_without_importing_deltazoo(self, tmp_path):
        """And what it saves again loads with the package as well, with the same weights."""
        model = tiny_named("gated_deltanet", **HYBRID)
        model.save_pretrained(tmp_path / "mine", remote_code=True)
        done = run(
            """
            import sys
            from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
            options = {"trust_remote_code": True}
            model = AutoModelForCausalLM.from_pretrained(sys.argv[1], **options)
            print(type(model).__name__, type(model).__module__.split(".")[0])
            model.save_pretrained(sys.argv[2])
            print(type(AutoModelForTokenClassification.from_pretrained(sys.argv[2], **options)).__name__)
            """,
            tmp_path / "mine",
            tmp_path / "again",
        )
        assert done.returncode == 0, done.stderr
        name, package, head = done.stdout.split()
        assert (name, package) == ("GatedDeltaNetForCausalLM", "transformers_modules")
        assert head == "GatedDeltaNetForTokenClassification"
        assert {path.name for path in (tmp_path / "again").iterdir()} == {
            path.name for path in (tmp_path / "mine").iterdir()
        }
        saved = load_file(tmp_path / "again" / "model.safetensors")
        assert all(torch.equal(saved[name], x) for name, x in model.state_dict().items())
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert type(loaded) is type(model)

    def test_nothing_runs_unless_asked_and_a_missing_package_is_named(self, tmp_path, capsys):
        """With the package its own classes are used; without it, loading fails with the reason."""
        tiny_named("efla").save_pretrained(tmp_path / "efla", remote_code=True)
        tiny_named("kda").save_pretrained(tmp_path / "kda", remote_code=True)
        for name in ("configuration_deltazoo.py", "modeling_deltazoo.py"):
            (tmp_path / "kda" / name).write_text("print('the checkpoint runs code')")
        assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "kda")) is deltazoo.models.KDAForCausalLM
        done = run(
            WITHOUT_DELTAZOO
            + "from transformers import AutoModelForCausalLM as Auto\n"
            + "try: Auto.from_pretrained(sys.argv[1])\n"
            + "except ValueError as error: print(error)\n"
            + "Auto.from_pretrained(sys.argv[2], trust_remote_code=True)",
            tmp_path / "kda",
            tmp_path / "efla",
        )
        assert done.returncode == 1 and "trust_remote_code=True" in done.stdout
        assert "runs code" not in done.stdout + capsys.readouterr().out
        last = done.stderr.strip().splitlines()[-1]
        assert "needs deltazoo, which is not on PyPI: run `pip install .` in a checkout of it" in last
        assert "pip install deltazoo" not in done.stderr + (tmp_path / "efla" / "README.md").read_text()

    @pytest.mark.parametrize("model_type", CONFIGS)
    def test_a_saved_folder_gets_the_same_files(self, model_type, tmp_path):
        model = tiny_named(model_type)
        model.save_pretrained(tmp_path / "before")
        export_remote_code(tmp_path / "before")
        model.save_pretrained(tmp_path / "at once", remote_code=True)
        for path in (tmp_path / "at once").iterdir():
            if path.suffix in (".json", ".py"):
                assert path.read_text() == (tmp_path / "before" / path.name).read_text(), path.name

    def test_a_model_keeps_the_files_of_its_checkpoint(self, tmp_path):
        tiny_named("kda").save_pretrained(tmp_path / "mine", remote_code=True)
        AutoModelForCausalLM.from_pretrained(tmp_path / "mine").save_pretrained(tmp_path / "again")
        assert (tmp_path / "again" / "modeling_deltazoo.py").exists()

    def test_strangers_are_refused(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            export_remote_code(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        with pytest.raises(ValueError, match="model type 'llama'"):
            export_remote_code(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


class Trap:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class TestNoPickle:
    @pytest.fixture
    def checkpoint(self, tmp_path):
        """Replace a checkpoint's weights by pickled ones that create a file when read."""
        tiny_named("kda").save_pretrained(tmp_path / "mine")
        (tmp_path / "mine" / "model.safetensors").unlink()
        (tmp_path / "mine" / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "trace")))
        yield tmp_path / "mine"
        assert not (tmp_path / "trace").exists()
        pickle.loads((tmp_path / "mine" / "pytorch_model.bin").read_bytes())
        assert (tmp_path / "trace").exists()  # it would have

    def test_pickled_weights_are_not_found(self, checkpoint):
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            AutoModelForCausalLM.from_pretrained(checkpoint)

    def test_nor_read_on_demand(self, checkpoint):
        for options in ({}, {"weights_only": False}):
            with pytest.raises(ValueError, match="never read"):
                AutoModelForCausalLM.from_pretrained(checkpoint, use_safetensors=False, **options)

    def test_nor_as_a_file(self, checkpoint):
        config = CONFIGS["kda"].from_pretrained(checkpoint)
        with pytest.raises(ValueError, match="never read"):
            deltazoo.models.KDAForCausalLM.from_pretrained(checkpoint / "pytorch_model.bin", config=config)

    def test_torch_load_is_never_called(self, checkpoint, monkeypatch):
        """A pickle that contains only tensors is refused too."""
        torch.save(tiny_named("kda").state_dict(), checkpoint / "pytorch_model.bin.index.json")
        monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch.load was called"))
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            AutoModelForCausalLM.from_pretrained(checkpoint, weights_only=True)


def in_a_folder(folder, tmp_path, **options):
    return folder, options


def in_a_subfolder(folder, tmp_path, **options):
    (tmp_path / "repository").mkdir()
    folder.rename(tmp_path / "repository" / "inside")
    return tmp_path / "repository", {**options, "subfolder": "inside"}


def from_the_hub(folder, tmp_path, **options):
    """As huggingface_hub keeps what it has downloaded."""
    repository = tmp_path / "cache" / "models--me--mine"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    folder.rename(repository / "snapshots" / ("0" * 40))
    return "me/mine", {**options, "cache_dir": str(tmp_path / "cache"), "local_files_only": True}


class TestShards:
    """An index of safetensors shards may name any file; only safetensors files in the checkpoint's folder are read."""

    @pytest.fixture(autouse=True)
    def no_pickle(self, monkeypatch):
        monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch.load was called"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    @staticmethod
    def checkpoint(model, tmp_path, shard, variant=None):
        """A checkpoint whose index names `shard` in place of its last one; where the file exists, all is well with it.

        Its configuration does not say the dtype of the weights, so that transformers looks for it in the first shard.
        """
        folder = tmp_path / "mine"
        model.save_pretrained(folder, max_shard_size="8KB", variant=variant)
        (index,) = folder.glob("*.index*.json")
        written = json.loads(index.read_text())
        last = max(written["weight_map"].values())
        names = {key: shard if name == last else name for key, name in written["weight_map"].items()}
        index.write_text(json.dumps({**written, "weight_map": names}))
        target = folder / shard
        target.parent.mkdir(exist_ok=True)
        if shard.endswith(".safetensors"):
            (folder / last).rename(target)
        else:
            torch.save(load_file(folder / last), target)
        config = json.loads((folder / "config.json").read_text())
        del config["dtype"]
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    @pytest.mark.parametrize(
        ("shard", "place", "variant"),
        [
            ("a.bin", in_a_folder, None),
            ("a.bin", in_a_subfolder, "fp16"),
            ("a.bin", from_the_hub, None),
            ("../other.safetensors", in_a_folder, "fp16"),
            ("../other.safetensors", from_the_hub, "fp16"),
            ("{tmp_path}/other.safetensors", in_a_subfolder, None),
        ],
    )
    def test_a_bad_name(self, place, variant, shard, tmp_path):
        shard = shard.format(tmp_path=tmp_path)
        folder = self.checkpoint(tiny_named("kda"), tmp_path, shard, variant)
        path, options = place(folder, tmp_path, variant=variant)
        with pytest.raises(ValueError, match=re.escape(f"{shard!r} is named as a file of the model's weights")):
            AutoModelForCausalLM.from_pretrained(path, **options)

    @pytest.mark.parametrize(
        ("shard", "place", "variant"),
        [
            ("other.safetensors", in_a_folder, None),
            ("other.safetensors", from_the_hub, "fp16"),
            ("below/other.safetensors", in_a_subfolder, "fp16"),
            ("below/other.safetensors", from_the_hub, None),
        ],
    )
    def test_a_good_name(self, place, variant, shard, tmp_path):
        model = tiny_named("kda")
        path, options = place(self.checkpoint(model, tmp_path, shard, variant), tmp_path, variant=variant)
        loaded = AutoModelForCausalLM.from_pretrained(path, **options).state_dict()
        assert all(torch.equal(loaded[name], x) for name, x in model.state_dict().items())

    @pytest.mark.parametrize("shard", ["a.bin", "../other.safetensors"])
    def test_of_a_swapped_model(self, shard, tmp_path):
        model = swapped("llama")
        folder = self.checkpoint(model, tmp_path, shard)
        with pytest.raises(ValueError, match=re.escape(f"{shard!r} is named as a file")):
            AutoModelForCausalLM.from_pretrained(folder)
        with pytest.raises(ValueError, match="never read"):
            AutoModelForCausalLM.from_pretrained(folder, use_safetensors=False)

    def test_of_the_model_below_an_adapter(self, tmp_path):
        folder = self.checkpoint(tiny_named("kda"), tmp_path, "a.bin")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
        adapter = LoraConfig(target_modules=["q_proj"], base_model_name_or_path=str(folder), task_type="CAUSAL_LM")
        adapter.save_pretrained(tmp_path / "adapter")
        with pytest.raises(ValueError, match="'a.bin' is named as a file"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")

    def test_of_a_pickled_adapter(self):
        """As `load_adapter` of transformers calls it."""
        model = tiny_named("kda")
        with pytest.raises(ValueError, match="'adapter_model.bin' is named as a file"):
            model._load_pretrained_model(
                model=model,
                state_dict=None,
                checkpoint_files=["../somewhere/adapter_model.bin"],
                load_config=LoadStateDictConfig(),
                expected_keys=[],
            )

    @pytest.mark.filterwarnings("ignore:KDAConfig. keys that do not act:UserWarning")
    def test_of_an_index_that_the_configuration_names(self, tmp_path):
        folder = self.checkpoint(tiny_named("kda"), tmp_path, "a.bin")
        (folder / "model.safetensors.index.json").rename(folder / "other.safetensors.index.json")
        config = json.loads((folder / "config.json").read_text())
        config |= {"dtype": "float32", "transformers_weights": "other.safetensors.index.json"}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="'a.bin' is named as a file"):
            AutoModelForCausalLM.from_pretrained(folder)
