"""``strategy="fsdp2"`` on whatever device torch knows, shown on the fake one: found by its name, by "auto", or refused.

Each test is a process of its own: a process has one accelerator, and the others of this package have none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PRELUDE = """
import json, warnings
import lightning as L, torch
from torch.utils.data import DataLoader

torch.set_num_threads(1)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options):
    return L.Trainer(max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                     enable_model_summary=False, **options)


def fit(**options):
    run = trainer(**options)
    run.fit(Module(), DataLoader(torch.ones(4, 4), batch_size=2))
    return str(run.strategy.root_device)


def without(part, call):
    import fsdp_fake_device

    with fsdp_fake_device.without(part):
        return call(strategy="fsdp2", accelerator="fake", devices=1)


def offloaded(**options):
    from fsdp_fsdp2 import FSDP2Strategy

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        device = fit(**{**options, "strategy": FSDP2Strategy(cpu_offload=True)})
    return [device, "".join(str(each.message) for each in caught if "pin_memory" in str(each.message))]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))

    def forward(self, values):
        return values + self.layers(values)


class Counted(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*(Block() for _ in range(12)))
        self.waits = []

    def forward(self, batch):
        return self.net(batch)

    def training_step(self, batch):
        return self.net(batch).square().mean()

    def on_train_batch_end(self, *_):
        self.waits.append(waits_until_now())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def waits_until_now():
    import fsdp_fake_device

    waited = dict(fsdp_fake_device.counters().host_syncs)
    fsdp_fake_device.reset_counters()
    return waited


def waits():
    # what the host waits for in the fourth step: by hand, under Fabric and under the Trainer
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import fsdp_fsdp2
    import fsdp_fsdp2.fabric

    batch = torch.ones(2, 8, device="fake:0")
    fabric = L.Fabric(strategy=fsdp_fsdp2.fabric.FSDP2Strategy(auto_wrap_policy={Block}), accelerator="fake", devices=1)
    fabric.launch()
    module = Counted()
    ours, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for _ in range(4):
        waits_until_now()
        fabric.backward(ours(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    under_fabric = waits_until_now()
    model = Counted().net.to("fake:0")
    mesh = init_device_mesh("fake", (1,))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        waits_until_now()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    by_hand = waits_until_now()
    module = Counted()
    run = trainer(strategy=fsdp_fsdp2.FSDP2Strategy(auto_wrap_policy={Block}), accelerator="fake", devices=1)
    run.fit_loop.epoch_loop.max_steps = 4
    run.fit(module, DataLoader(torch.ones(8, 8), batch_size=2))
    return [by_hand, under_fabric, module.waits[3]]


def refusal(**options):
    try:
        fit(**options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"
"""


def answer(expression: str, tmp_path: Path, **variables: str) -> Any:
    """What an expression is in a process with two fake devices."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}  # of tests before
    environment = {**kept, "FSDP_FAKE_DEVICES": "2", **variables}
    script = f"{PRELUDE}\nif __name__ == '__main__':\n    print('ANSWER', json.dumps({expression}))\n"
    file = tmp_path / "script.py"
    file.write_text(script)
    run = subprocess.run(
        [sys.executable, str(file)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, run.stderr[-3000:]
    return json.loads(lines[0].removeprefix("ANSWER "))


def test_it_is_found_by_its_name_and_by_auto(tmp_path: Path) -> None:
    names = answer(
        "[fit(strategy='fsdp2', accelerator='fake', devices=[1]), fit(strategy='fsdp2', devices=1),"
        " fit(strategy='fsdp2', accelerator='cpu', devices=1), fit(devices=1),"
        " str(L.Fabric(strategy='fsdp2', devices=1).device), len(trainer(strategy='fsdp2').strategy.parallel_devices),"
        " sorted(trainer(strategy='fsdp2', devices=1).accelerator.get_device_stats('fake:0'))[:1]]",
        tmp_path,
    )
    # Lightning's own strategy, and what was put on the CPU, stay there
    assert names == ["fake:1", "fake:0", "cpu", "cpu", "fake:0", 2, ["active.all.allocated"]]


def test_what_is_refused(tmp_path: Path) -> None:
    refused = {
        "strategy='fsdp2', accelerator='npu'": ("knows fake", "Install torch_npu (pip install torch-npu)"),
        "strategy='fsdp2', accelerator='fake', devices=3": ("torch sees 2 here", "Write devices=2 or fewer"),
        "strategy='fsdp2', accelerator='fake', devices=[0, 0]": ("[0, 0]", "each once"),
        "accelerator='fake', devices=1": ("Lightning's own strategies", "SingleDeviceStrategy(device='fake:0')"),
    }
    messages = answer(f"[{', '.join(f'refusal({options})' for options in refused)}]", tmp_path)
    for message, words in zip(messages, refused.values(), strict=True):
        assert message.startswith("StrategyUnavailableError")
        for each in words:
            assert each in message


def test_what_a_device_lacks_is_named(tmp_path: Path) -> None:
    lacking = {
        "collectives": "no process-group backend is registered with torch for this kind of device",
        "random state": "fake:0 has no torch.fake.get_rng_state(device), and dropout and exact resumes need it",
        "streams": "fake:0 has no torch.Stream(device), and gathers and reductions run on streams beside computation",
    }
    *messages, device, warning = answer(
        f"[without(part, refusal) for part in {list(lacking)}] + without('pinned memory', offloaded)", tmp_path
    )
    for message, words in zip(messages, lacking.values(), strict=True):
        assert message.startswith("StrategyUnavailableError")
        assert words in message
        assert "`fsdp doctor --device fake`" in message
    assert device == "fake:0"  # slower, and right
    assert "pin_memory=True) gives no host memory that 'fake' devices copy from" in warning


def test_a_step_waits_for_the_device_no_more_than_one_by_hand(tmp_path: Path) -> None:
    by_hand, fabric, trainer = answer("waits()", tmp_path)
    assert fabric == by_hand
    assert trainer == by_hand


def test_the_doctor_tries_a_device(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fsdp_core", "doctor", "--json", "--device"]
    environment = {**os.environ, "FSDP_FAKE_DEVICES": "1"}
    run = subprocess.run([*command, "fake"], env=environment, capture_output=True, text=True, timeout=300, check=False)
    rows = json.loads(run.stdout)["requirements"]
    assert {row["name"]: row["result"] for row in rows if row["result"] != "there"} == {}
    assert run.returncode == 0
    run = subprocess.run([*command, "npu"], env=environment, capture_output=True, text=True, timeout=300, check=False)
    first = json.loads(run.stdout)["requirements"][0]
    assert "torch's accelerator in this process is fake" in first["result"]
    assert run.returncode == 1
