"""``import torch`` brings our names into Lightning, and can't come to harm by it. Real interpreters, real Lightning."""

from __future__ import annotations

import pytest

from conftest import IMPLEMENTATION, Site

TINY = """name="tiny", summary="One device.", trainer="tiny_impl:ForTrainer", fabric="tiny_impl:ForFabric",
    accelerators=("cpu",), options=[Option(name="level", default=1)]"""


@pytest.fixture
def tiny_site(site: Site) -> Site:
    """A plugin whose strategies are Lightning's own for one device."""
    site.provide(
        "tiny-plugin", TINY, TINY.replace('"tiny"', '"tiny_3"') + ', presets={"level": 3}', tiny_impl=IMPLEMENTATION
    )
    return site


def test_a_script_that_imports_lightning_alone_can_say_the_name(tiny_site: Site) -> None:
    tiny_site.python(
        """
        import sys
        from lightning.pytorch import Trainer
        from lightning.fabric import Fabric
        assert "tiny_plugin_plugin" not in sys.modules
        from lightning.pytorch.strategies import StrategyRegistry
        assert "tiny" in StrategyRegistry
        assert "tiny_plugin_plugin" in sys.modules and "tiny_impl" not in sys.modules

        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer = Trainer(strategy="tiny", accelerator="cpu", **quiet)
        assert type(trainer.strategy).__qualname__ == "ForTrainer" and trainer.strategy.level == 1
        assert Trainer(strategy="TINY_3", accelerator="cpu", **quiet).strategy.level == 3
        assert type(Fabric(strategy="tiny", accelerator="cpu")._strategy).__qualname__ == "ForFabric"

        from lightning.pytorch.demos.boring_classes import BoringModel
        Trainer(strategy="tiny", accelerator="cpu", fast_dev_run=True, **quiet).fit(BoringModel())

        assert StrategyRegistry["tiny"]["description"] == "One device."
        """,
        "-W",
        "error::RuntimeWarning",
    )


@pytest.mark.parametrize("by_hand", ["before Lightning", "after Lightning"])
def test_the_environment_variable_turns_it_off_and_an_import_does_it_by_hand(tiny_site: Site, by_hand: str) -> None:
    tiny_site.forked(
        f"""
        import sys
        import torch
        assert "fsdp_core" not in sys.modules
        if {by_hand == "before Lightning"}:
            import fsdp_core.lightning
        from lightning.pytorch import Trainer
        if {by_hand == "after Lightning"}:
            message = failure(lambda: Trainer(strategy="tiny", accelerator="cpu"))
            assert message.startswith("ValueError: You selected an invalid strategy name: `strategy='tiny'`"), message
            import fsdp_core.lightning
        assert type(Trainer(strategy="tiny", accelerator="cpu", logger=False).strategy).__qualname__ == "ForTrainer"
        from lightning.fabric.strategies import STRATEGY_REGISTRY
        assert type(STRATEGY_REGISTRY.get("tiny")).__name__ == "ForFabric"
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def test_importing_torch_loads_no_plugin(tiny_site: Site) -> None:
    tiny_site.plugin("exiting-plugin", "raise SystemExit('must not be loaded')")
    tiny_site.python("""
        import sys
        import torch
        ours = {name for name in sys.modules if name.startswith(("fsdp_", "tiny_", "pluggy", "exiting"))}
        assert ours == {"fsdp_core", "fsdp_core.autoload"}, ours
    """)


def test_the_finder_leaves_no_trace_in_the_modules(tiny_site: Site) -> None:
    tiny_site.forked("""
        import copy, importlib, importlib.machinery, importlib.resources, importlib.util, inspect, pickle, sys
        import torch
        from fsdp_core import autoload

        count = len(sys.meta_path)
        autoload.install(), autoload.install()
        assert len(sys.meta_path) == count
        finder, = [one for one in sys.meta_path if type(one).__module__ == "fsdp_core.autoload"]
        assert finder.find_spec("json") is None and finder.find_spec("lightning.pytorch.nothing") is None

        import lightning.fabric  # its strategies are imported now, those of pytorch_lightning are not
        name = "pytorch_lightning.strategies"
        path = importlib.util.find_spec("pytorch_lightning").submodule_search_locations
        spec = finder.find_spec(name, path)
        plain = importlib.machinery.PathFinder.find_spec(name, path)
        for one in (spec, pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
            assert (one.name, one.origin, one.cached) == (plain.name, plain.origin, plain.cached)
            assert one.submodule_search_locations == plain.submodule_search_locations
            assert one.loader.get_code(name) == plain.loader.get_code(name)
        assert spec.loader.path == plain.origin and spec.loader.is_package(name)
        assert spec.loader.get_source(name) == plain.loader.get_source(name)
        assert not hasattr(spec.loader, "load_modules")
        assert name not in sys.modules
        assert finder.find_spec(name, []) is None

        import lightning.pytorch.strategies as strategies
        assert type(strategies.__loader__) is importlib.machinery.SourceFileLoader
        assert strategies.__spec__.loader is strategies.__loader__
        assert inspect.getsource(strategies).startswith("# Copyright")
        assert importlib.resources.files(strategies).joinpath("ddp.py").is_file()
        assert importlib.util.find_spec("lightning.pytorch.strategies") is strategies.__spec__
        pickle.dumps(strategies.__spec__)

        before = strategies.StrategyRegistry
        importlib.reload(strategies)
        assert strategies.StrategyRegistry is not before and "tiny" in strategies.StrategyRegistry
        assert strategies.StrategyRegistry.keys() == before.keys()
        assert type(strategies.__loader__) is importlib.machinery.SourceFileLoader
        restored = pickle.loads(pickle.dumps(before))
        assert restored.available_strategies() == before.available_strategies()
    """)


def test_an_error_in_lightnings_own_module_comes_through(site: Site) -> None:
    site.distribution("stand-in", modules={"lightning.fabric.strategies.__init__": "raise RuntimeError('theirs')"})
    for folder in ("lightning", "lightning/fabric"):
        (site.path / folder / "__init__.py").touch()
    site.python("""
        import sys
        import fsdp_core.autoload
        fsdp_core.autoload.install()
        for _ in range(2):
            def again():
                import lightning.fabric.strategies
            assert failure(again) == "RuntimeError: theirs"
            assert "lightning.fabric.strategies" not in sys.modules
    """)


@pytest.mark.parametrize("action", ["always", "error"])
def test_a_fault_of_ours_is_one_warning_and_lightning_works(site: Site, action: str) -> None:
    done = site.forked(
        """
        import torch
        import fsdp_core.plugins.registry

        def discover():
            raise OSError("the disk is on fire")

        fsdp_core.plugins.registry.discover = discover
        import lightning.fabric.strategies
        assert "ddp" in lightning.fabric.strategies.STRATEGY_REGISTRY
        """,
        warn=[f"{action}::RuntimeWarning"],
    )
    message = (
        "fsdp-core could not enter its strategy names in lightning.fabric.strategies: OSError: the disk is on fire\n"
        "Lightning works without them. `fsdp doctor` shows what is wrong."
    )
    assert done.stderr.count(message) == 1


def test_install_never_raises(site: Site) -> None:
    done = site.python(
        """
        import sys
        from fsdp_core.autoload import install

        class Hostile:
            @property
            def __spec__(self):
                raise OSError("no module at all")

        sys.modules["lightning.fabric.strategies"] = Hostile()
        install()
        """
    )
    assert "RuntimeWarning: fsdp-core could not watch for Lightning: OSError: no module at all" in done.stderr
    assert "Traceback" not in done.stderr
