"""Which names Lightning's registries hold, whose they are, and what the wrong ones say. Real Trainer, real Fabric."""

from __future__ import annotations

import pytest

from conftest import IMPLEMENTATION, Site

CPU = 'summary="s", accelerators=("cpu",)'
BOTH = 'trainer="tiny_impl:ForTrainer", fabric="tiny_impl:ForFabric"'
SAY = """
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer

    def trainer(name):
        return Trainer(strategy=name, accelerator="cpu", logger=False)

    def fabric(name):
        return Fabric(strategy=name, accelerator="cpu")

    def expect(call, name, message):
        got = failure(lambda: call(name))
        assert got.startswith(message), f"{name}: {got}"
"""


def test_both_files_know_the_same_modules() -> None:
    from fsdp_core.autoload import STRATEGY_MODULES
    from fsdp_core.lightning.registration import entries as names

    assert tuple(names._LOCATIONS) == STRATEGY_MODULES


def test_lightnings_own_names_stay_lightnings(site: Site) -> None:
    claims = ("ddp", "fsdp", "single_tpu", "auto", "xla_fsdp")
    site.provide("greedy-plugin", *(f'name="{name}", {BOTH}, {CPU}' for name in claims), tiny_impl=IMPLEMENTATION)
    done = site.forked(
        """
        import torch
        import lightning.fabric.strategies as fabric
        import lightning.pytorch.strategies as trainer
        assert trainer.StrategyRegistry["ddp"]["strategy"] is trainer.DDPStrategy
        assert trainer.StrategyRegistry["fsdp"]["strategy"] is trainer.FSDPStrategy
        assert fabric.STRATEGY_REGISTRY["fsdp"]["strategy"] is fabric.FSDPStrategy
        assert fabric.STRATEGY_REGISTRY["xla_fsdp"]["strategy"] is fabric.XLAFSDPStrategy
        assert type(trainer.StrategyRegistry.get("xla_fsdp")).__name__ == "ForTrainer"
        """
    )
    for module, names in {
        "lightning.fabric.strategies": claims,
        "lightning.pytorch.strategies": ("ddp", "fsdp", "single_tpu", "auto"),
    }.items():
        for name in names:
            assert (
                done.stderr.count(
                    f"the strategy {name!r} of greedy-plugin 1.0 is passed over: "
                    f"{module} has its own of that name.\n"
                    "To use it, have its authors choose another name; to be rid of this warning, type: "
                    "pip uninstall greedy-plugin\n"
                )
                == 1
            ), (module, name, done.stderr)
    assert done.stderr.count("is passed over") == 9


@pytest.mark.usefixtures("replace_first_party")
def test_fabrics_xla_fsdp_is_taken_over_when_fsdp_xla_is_installed(site: Site) -> None:
    site.provide("fsdp-xla", f'name="xla_fsdp", {BOTH}, {CPU}', tiny_impl=IMPLEMENTATION)
    code = """
        import lightning.pytorch
        import lightning.fabric.strategies as fabric
        import lightning_fabric.strategies as alone
        print(type(lightning.pytorch.strategies.StrategyRegistry.get("xla_fsdp")).__name__)
        print(type(fabric.STRATEGY_REGISTRY.get("xla_fsdp")).__name__)
        assert alone.STRATEGY_REGISTRY["xla_fsdp"]["strategy"] is alone.XLAFSDPStrategy
    """
    assert site.forked(code).stdout == "ForTrainer\nForFabric\n"
    # Lightning's own would be a silent fallback when two packages claim the name.
    site.provide("other-plugin", f'name="xla_fsdp", {BOTH}, {CPU}')
    site.forked(
        SAY
        + """
    for call in (trainer, fabric):
        expect(call, "xla_fsdp", "DuplicateStrategyError: strategy 'xla_fsdp' is ambiguous: fsdp-xla 1.0 and")
    """
    )


def test_names_that_cannot_be_used_say_why(site: Site) -> None:
    site.provide("one-plugin", f'name="twice", {BOTH}, {CPU}', f'name="trainers", trainer="math:floor", {CPU}')
    site.provide(
        "two-plugin",
        f'name="twice", {BOTH}, {CPU}',
        f'name="fabrics", fabric="math:floor", {CPU}',
        f'name="elsewhere", {BOTH}, {CPU}, probe="probes:no"',
        f'name="hollow", trainer="no_module:Class", fabric="no_module:Class", {CPU}',
        probes="def no():\n    return 'there is no TPU'",
    )
    site.plugin("bad-plugin", "import my_dep")
    site.forked(
        SAY
        + """
    for call in (trainer, fabric):
        expect(call, "twice", "DuplicateStrategyError: strategy 'twice' is ambiguous: one-plugin 1.0 and two-plugin")
        expect(call, "elsewhere", "StrategyUnavailableError: strategy 'elsewhere' (two-plugin 1.0) can't run here: "
               "there is no TPU")
        expect(call, "hollow", "BrokenStrategyError: strategy 'hollow' (two-plugin 1.0) can't be imported from "
               "'no_module:Class': ModuleNotFoundError: No module named 'no_module'")
        expect(call, "bad_plugin", "BrokenStrategyError: strategy 'bad_plugin' can't be used: bad-plugin 1.0 failed")
        expect(call, "FSDP_native", "StrategyNotInstalledError: strategy 'fsdp_native' is not installed. "
               "Type: pip install fsdp-cuda-native")
    expect(trainer, "xla_fsdp", "StrategyNotInstalledError: strategy 'xla_fsdp' is not installed. "
           "Type: pip install fsdp-xla")
    expect(trainer, "fabrics", "UnsupportedCapabilityError: strategy 'fabrics' (two-plugin 1.0) has no class for "
           "lightning.pytorch.Trainer, only one for lightning.fabric.Fabric.")
    expect(fabric, "trainers", "UnsupportedCapabilityError: strategy 'trainers' (one-plugin 1.0) has no class for "
           "lightning.fabric.Fabric, only one for lightning.pytorch.Trainer.")

    import lightning.fabric.strategies
    registry = lightning.fabric.strategies.STRATEGY_REGISTRY
    assert registry["xla_fsdp"]["strategy"] is lightning.fabric.strategies.XLAFSDPStrategy
    """,
        warn=["error::RuntimeWarning"],
    )


def test_a_misspelt_name_gets_our_error_and_no_other_string_does(site: Site) -> None:
    site.provide("tiny-plugin", f'name="tiny", {BOTH}, {CPU}', f'name="fsdp7", {BOTH}, {CPU}', tiny_impl=IMPLEMENTATION)
    site.forked(
        SAY
        + """
    for call in (trainer, fabric):
        expect(call, "fsdp77", "UnknownStrategyError: no strategy named 'fsdp77'. Did you mean 'fsdp7'?\\n"
               "Installed: fsdp7, tiny (tiny-plugin 1.0).\\n"
               "Not installed: ddp_fully_sharded, fsdp_native, fsdp_native_full_shard_offload → "
               "pip install fsdp-cuda-native\\nNot installed: ")
        expect(call, "TINNY", "UnknownStrategyError: no strategy named 'tinny'. Did you mean 'tiny'?")
        expect(call, "fsdp_cpu_ofload", "UnknownStrategyError: no strategy named 'fsdp_cpu_ofload'. "
               "Did you mean 'fsdp2_cpu_offload' or Lightning's own 'fsdp_cpu_offload'?")
        expect(call, "my_fsdp_of_2019", "UnknownStrategyError: no strategy named 'my_fsdp_of_2019'.")
        for theirs in ("ddp2", "dddp", "deepsped", "nonsense", ""):
            expect(call, theirs, f"ValueError: You selected an invalid strategy name: `strategy={theirs!r}`")
        expect(call, 5, "ValueError: You selected an invalid strategy name: `strategy=5`")
        call("auto"), call("ddp_spawn"), call("tiny")

    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry
    for registry in (STRATEGY_REGISTRY, StrategyRegistry):
        names = registry.available_strategies()
        assert "fsdp7" in names and "ddp" in names
        assert "fsdp77" not in names and 5 not in names  # only Lightning's connectors get the error
        assert isinstance(names, list) and names == list(registry)
        registry.register("made_by_the_user", lambda: None)
        assert "made_by_the_user" in registry.available_strategies()

    import pickle
    assert pickle.loads(pickle.dumps(names)) == names
    """
    )


def test_a_package_that_is_installed_after_lightnings_import_is_found(site: Site) -> None:
    """As by ``pip install`` in a notebook, after a Trainer was asked for a name that did not exist yet."""
    later = Site(path=site.path / "later", scripts=site.scripts)
    later.path.mkdir()
    later.provide("late-plugin", f'name="late_fsdp", {BOTH}, {CPU}', tiny_impl=IMPLEMENTATION)
    site.forked(
        SAY
        + """
    import sys
    for call in (trainer, fabric):
        expect(call, "late_fsdp", "UnknownStrategyError: no strategy named 'late_fsdp'.")
    sys.path.append("later")
    assert type(trainer("late_fsdp").strategy).__name__ == "ForTrainer"
    assert type(fabric("late_fsdp").strategy).__name__ == "ForFabric"
    """
    )


def test_the_stand_alone_packages_get_an_error_that_names_the_import(site: Site) -> None:
    site.provide("tiny-plugin", f'name="tiny", {BOTH}, {CPU}', tiny_impl=IMPLEMENTATION)
    site.forked("""
        import sys
        from pytorch_lightning import Trainer
        from lightning_fabric import Fabric

        def message(call):
            return failure(lambda: call(strategy="tiny", accelerator="cpu"))

        assert message(Trainer) == (
            "StrategyUnavailableError: strategy 'tiny' works with the package 'lightning' (pip install lightning), "
            "but this script imports 'pytorch_lightning', whose classes are others.\\n"
            "Write `import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`, "
            "everywhere in the script."
        )
        assert message(Fabric) == (
            "StrategyUnavailableError: strategy 'tiny' works with the package 'lightning' (pip install lightning), "
            "but this script imports 'lightning_fabric', whose classes are others.\\n"
            "Write `from lightning.fabric import Fabric` in place of `from lightning_fabric import Fabric`, "
            "everywhere in the script."
        )
        assert failure(lambda: Trainer(strategy="fsdp2", accelerator="cpu")).startswith(
            "StrategyNotInstalledError: strategy 'fsdp2' is not installed. Type: pip install fsdp-fsdp2\\n"
        )
        assert failure(lambda: Fabric(strategy="fsdp22", accelerator="cpu")).startswith("UnknownStrategyError: ")
        assert "tiny_impl" not in sys.modules and "lightning.pytorch" not in sys.modules
    """)


def test_an_object_elsewhere_is_told_from_a_wrong_name(site: Site) -> None:
    """Given to another front end, or to a stand-alone package."""
    impl = """
        from fsdp_core.testing.loopback.fabric import LoopbackFabricStrategy as ForFabric
        from fsdp_core.testing.loopback.trainer import LoopbackTrainerStrategy as ForTrainer
    """
    site.provide("tiny-plugin", f'name="loopback", {BOTH}, {CPU}', tiny_impl=impl)
    site.forked("""
        import lightning, lightning_fabric, pytorch_lightning
        from tiny_impl import ForFabric, ForTrainer

        def message(call, strategy):
            return failure(lambda: call(strategy=strategy, accelerator="cpu"))

        assert message(pytorch_lightning.Trainer, ForTrainer()) == (
            "StrategyUnavailableError: fsdp_core.testing.loopback.trainer.LoopbackTrainerStrategy works with the "
            "package 'lightning' (pip install lightning), but this script imports 'pytorch_lightning', whose classes "
            "are others.\\nWrite `import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`, "
            "everywhere in the script."
        )
        assert "`from lightning.fabric import Fabric`" in message(lightning_fabric.Fabric, ForFabric())
        assert message(lightning.Fabric, ForTrainer()) == (
            "UnsupportedCapabilityError: fsdp_core.testing.loopback.trainer.LoopbackTrainerStrategy can't be given to "
            "lightning.fabric.Fabric, which has a class of its own.\\n"
            "Write `from tiny_impl import ForFabric`, or strategy='loopback'."
        )
        assert "`from tiny_impl import ForTrainer`" in message(lightning.Trainer, ForFabric())
        assert type(lightning.Trainer(strategy=ForTrainer(), accelerator="cpu").strategy) is ForTrainer
        assert message(lightning.Trainer, 5).startswith("ValueError: You selected an invalid strategy name")
    """)


def test_lightnings_command_line_takes_the_name(site: Site) -> None:
    site.provide("tiny-plugin", f'name="tiny", {BOTH}, {CPU}', tiny_impl=IMPLEMENTATION)
    site.forked("""
        from lightning.pytorch.cli import LightningCLI
        from lightning.pytorch.demos.boring_classes import BoringModel

        arguments = ["--trainer.strategy=tiny", "--trainer.accelerator=cpu", "--trainer.logger=false"]
        cli = LightningCLI(BoringModel, run=False, save_config_callback=None, args=arguments)
        assert type(cli.trainer.strategy).__qualname__ == "ForTrainer"
        arguments[0] = "--trainer.strategy=tinny"
        assert failure(
            lambda: LightningCLI(BoringModel, run=False, save_config_callback=None, args=arguments)
        ).startswith("UnknownStrategyError: no strategy named 'tinny'. Did you mean 'tiny'?")
    """)


def test_fabric_run_takes_the_name(site: Site) -> None:
    site.provide("tiny-plugin", f'name="tiny", {BOTH}, {CPU}', tiny_impl=IMPLEMENTATION)
    (site.path / "train.py").write_text(
        "from lightning.fabric import Fabric\nprint('strategy:', type(Fabric()._strategy).__qualname__)\n"
    )
    (site.path / "launch.py").write_text("from lightning.fabric.cli import _main\n_main()\n")
    done = site.fork("launch.py", "run", "--strategy=tiny", "--accelerator=cpu", "train.py")
    assert "strategy: ForFabric" in done.stdout
