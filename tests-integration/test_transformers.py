"""The scripts of docs/transformers.md, run as it says: their losses are those of an unsharded loop."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from forked_scripts import run_forked
from fsdp_core.checkpoint import read_manifest
from fsdp_core.testing.oracle import FP32_TOLERANCE
from test_documentation import ROOT

EXAMPLES = ROOT / "docs/examples"
IMPORTS = ("transformers.models.llama.modeling_llama", "peft")

# The examples' models and data in one process of plain torch: the losses of each epoch, and the adapters' names.
# The Trainer shuffles what several ranks train on, by torch's DistributedSampler.
PLAIN = """
import json
import lightning
import llama
import lora
import torch
from peft import get_peft_model_state_dict

def epochs(module, optimizer, data):
    for epoch in range(4):
        losses, order = [], torch.randperm(48, generator=torch.Generator().manual_seed(epoch))
        for batch in data[order].split(16):
            loss = module.model(input_ids=batch, labels=batch).loss
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield sum(losses) / len(losses)

told = []
for example, kind in ((llama, llama.Llama), (lora, lora.LoRA)):
    lightning.seed_everything(0)
    module = kind()
    told += epochs(module, module.configure_optimizers(), example.text(batch_size=16).dataset)
print(json.dumps({"losses": told, "adapters": sorted(get_peft_model_state_dict(module.model))}))
"""


# The line that docs/token-mean.md shows, beside the model's own mean.
ONE_LINE = """
import fsdp_core
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
ids = torch.randint(0, 32, (2, 8))
batch = {"input_ids": ids, "labels": ids.masked_fill(torch.arange(16).view(2, 8) % 3 == 1, -100)}
loss = fsdp_core.token_mean(model(**batch, num_items_in_batch=1).loss, batch["labels"][:, 1:] != -100)
torch.testing.assert_close(loss, model(**batch).loss)
print("the same mean")
"""


def run(script: str, folder: Path, *words: str) -> str:
    """What a script prints that finds transformers, peft, and the examples."""
    finds = os.pathsep.join((os.environ["FSDP_TESTS_TRANSFORMERS"], str(EXAMPLES)))
    (folder / "script.py").write_text(script, encoding="utf-8")
    return run_forked(folder / "script.py", *words, folder=folder, finds=finds, imports=IMPORTS)


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"\bloss (\d\S+)", output)]


@pytest.mark.parametrize("example", ["llama.py", "lora.py", "from_folder.py", "tensor_parallel_plans.py"])
def test_the_page_shows_the_examples(example: str) -> None:
    page = (ROOT / "docs/transformers.md").read_text(encoding="utf-8")
    assert f"```python\n{(EXAMPLES / example).read_text(encoding='utf-8')}```" in page


def test_llama_and_lora_upon_it(tmp_path: Path) -> None:
    llama, lora = ((EXAMPLES / name).read_text(encoding="utf-8") for name in ("llama.py", "lora.py"))
    trained = run(llama, tmp_path, "fsdp2")
    assert "The exported Llama is the one in the checkpoint." in trained
    assert read_manifest(tmp_path / "llama.ckpt").world_size == 2
    further = run((EXAMPLES / "from_folder.py").read_text(encoding="utf-8"), tmp_path, "fsdp2")
    assert "Read 39 tensors; the last of 2 folders: LlamaForCausalLM" in further
    assert losses(further)[0] < losses(trained)[-1], "it goes on from the folder"
    begun = run(lora, tmp_path, "fsdp2", "2")
    gone_on = run(lora, tmp_path, "fsdp_native", "4")
    assert "The base and the exported adapters make the model in the checkpoint." in gone_on
    assert read_manifest(tmp_path / "lora.ckpt").strategy == "fsdp_native"
    plain = json.loads(run(PLAIN, tmp_path).splitlines()[-1])
    assert [*losses(trained), *losses(begun), *losses(gone_on)] == pytest.approx(plain["losses"], abs=FP32_TOLERANCE)
    adapters = load_file(tmp_path / "my-adapter/adapter_model.safetensors")
    assert sorted(adapters) == plain["adapters"]


def test_a_models_loss_is_a_mean_over_all_tokens_in_one_line(tmp_path: Path) -> None:
    line = 'loss = fsdp_core.token_mean(model(**batch, num_items_in_batch=1).loss, batch["labels"][:, 1:] != -100)'
    assert line in ONE_LINE
    assert line in (ROOT / "docs/token-mean.md").read_text(encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text(ONE_LINE, encoding="utf-8")
    finds = os.environ["FSDP_TESTS_TRANSFORMERS"]
    assert "the same mean" in run_forked(script, folder=tmp_path, finds=finds, imports=IMPORTS[:1])
