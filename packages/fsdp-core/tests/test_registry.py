from __future__ import annotations

import pytest

import fsdp_core
from conftest import Site
from fsdp_core.plugins import registry

CPU = 'accelerators=("cpu",), summary="s"'
NOT_INSTALLED = (
    "Not installed: ddp_fully_sharded, fsdp_native, fsdp_native_full_shard_offload → pip install fsdp-cuda-native\n"
    "Not installed: fsdp2, fsdp2_cpu_offload → pip install fsdp-fsdp2\n"
    "Not installed: xla_fsdp, xla_fsdp_full, xla_fsdp_spmd → pip install fsdp-xla"
)


def error(site: Site, name: str, front_end: str = "trainer") -> str:
    """What ``fsdp_core.resolve`` raises in a new interpreter."""
    code = f"import fsdp_core\nprint(failure(lambda: fsdp_core.resolve({name!r}, {front_end!r})))"
    return site.python(code).stdout.removesuffix("\n")


def test_names_are_listed_described_and_resolved_without_torch(site: Site) -> None:
    site.provide(
        "good-plugin",
        f'name="zeta", trainer="good_impl:Zeta", {CPU}',
        f"""name="alpha", trainer="good_impl:Zeta", fabric="good_impl:Zeta", {CPU},
            options=[Option(name="level", default=1)], presets={{"level": 3}}""",
        version="2.5",
        good_impl="""
            class Zeta:
                def __init__(self, level=1):
                    self.level = level
        """,
    )
    site.python("""
        import sys
        import fsdp_core
        from fsdp_core.plugins import registry

        assert list(fsdp_core.strategies()) == ["alpha", "zeta"]
        assert fsdp_core.describe("ALPHA").name == "alpha"
        assert str(registry.provider("alpha")) == "good-plugin 2.5"
        assert registry.unavailable("alpha") is None
        assert "good_impl" not in sys.modules
        Zeta = fsdp_core.resolve("Zeta", "trainer")
        assert isinstance(Zeta, type) and Zeta.__name__ == "Zeta"
        assert fsdp_core.resolve("zeta", "trainer")().level == 1
        assert fsdp_core.resolve("alpha", "fabric")().level == 3
        assert fsdp_core.resolve("alpha", "fabric")(level=4).level == 4
        assert not {"torch", "lightning", "numpy"} & set(sys.modules)
    """)


def test_the_original_error_is_chained(site: Site) -> None:
    site.plugin("bad-plugin", "import my_dep")
    site.python("""
        import fsdp_core
        try:
            fsdp_core.resolve("bad_plugin", "trainer")
        except fsdp_core.BrokenStrategyError as error:
            assert isinstance(error.__cause__, ModuleNotFoundError)
            assert error.__cause__.name == "my_dep"
        else:
            raise AssertionError
    """)


def test_one_package_with_one_name_twice(site: Site) -> None:
    site.provide("one-plugin", *[f'name="twice", trainer="a:B", {CPU}'] * 2)
    assert error(site, "twice") == (
        "DuplicateStrategyError: strategy 'twice' is ambiguous: one-plugin 1.0 provides it more than once.\n"
        "Report this to the authors of one-plugin; to get rid of it, type: pip uninstall one-plugin"
    )


def test_an_unknown_name_shows_the_nearest_and_all_there_is(site: Site) -> None:
    site.provide("good-plugin", f'name="fsdp7", trainer="a:B", {CPU}', f'name="fsdp8", trainer="a:B", {CPU}')
    site.provide("one-plugin", f'name="twice", trainer="a:B", {CPU}')
    site.provide("two-plugin", f'name="twice", trainer="a:B", {CPU}')
    site.plugin("my-plugin", "import my_dep")
    assert error(site, "fsdp77") == (
        "UnknownStrategyError: no strategy named 'fsdp77'. Did you mean 'fsdp7'?\n"
        "Installed: fsdp7, fsdp8 (good-plugin 1.0).\n"
        f"{NOT_INSTALLED}\n"
        "Claimed twice: twice (one-plugin 1.0 and two-plugin 1.0)\n"
        "Broken: my-plugin 1.0 failed to load: ModuleNotFoundError: No module named 'my_dep'"
    )


def test_an_unknown_name_where_nothing_is_near_or_installed(site: Site) -> None:
    assert error(site, "qqq") == (f"UnknownStrategyError: no strategy named 'qqq'.\nInstalled: none.\n{NOT_INSTALLED}")


@pytest.mark.parametrize("path", ["good.Zeta", "good.impl.zeta", "Zeta"])
def test_the_path_of_a_class_instead_of_a_name(site: Site, path: str) -> None:
    preset = 'name="preset", trainer="good.impl:Zeta", options=[Option(name="level", default=1)], presets={"level": 3}'
    site.provide("good-plugin", f"{preset}, {CPU}", f'name="alpha", trainer="good.impl:Zeta", {CPU}')
    module = path.rpartition(".")[0] or "good.impl"
    assert error(site, path).partition("\n")[0] == (
        f"UnknownStrategyError: no strategy named {path.lower()!r}. Zeta is the class of 'alpha': write "
        "strategy='alpha', or pass an object of the class. On LightningCLI's command line, type "
        f"--trainer.strategy alpha, or, to set options, --trainer.strategy.class_path {module}.Zeta"
    )
    assert "class" not in error(site, f"other.{path}")


@pytest.mark.parametrize(("name", "package"), registry.FIRST_PARTY.items())
def test_a_name_whose_package_is_not_installed(site: Site, name: str, package: str) -> None:
    site.provide("good-plugin", f'name="fsdp7", trainer="a:B", {CPU}')
    assert error(site, name.upper()) == (
        f"StrategyNotInstalledError: strategy {name!r} is not installed. Type: pip install {package}\n"
        "Installed: fsdp7 (good-plugin 1.0)."
    )


@pytest.mark.usefixtures("replace_first_party")
def test_a_name_that_the_installed_package_is_too_old_for(site: Site) -> None:
    site.provide("FSDP_fsdp2", f'name="fsdp2", trainer="a:B", {CPU}')
    assert error(site, "fsdp2_cpu_offload") == (
        "StrategyNotInstalledError: the installed fsdp-fsdp2 has no strategy 'fsdp2_cpu_offload'.\n"
        "Type: pip install --upgrade fsdp-fsdp2"
    )


@pytest.mark.usefixtures("replace_first_party")
def test_every_name_of_a_broken_package_of_ours_is_broken_not_missing(site: Site) -> None:
    site.plugin("fsdp-fsdp2", "import my_dep")
    assert error(site, "fsdp2_cpu_offload").startswith(
        "BrokenStrategyError: strategy 'fsdp2_cpu_offload' can't be used: fsdp-fsdp2 1.0 failed to load: "
    )
    assert "fsdp-fsdp2" not in error(site, "qqq").partition("Broken: ")[0]


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        (
            "return 'there is no such card'",
            "StrategyUnavailableError: strategy 'choosy' (choosy-plugin 1.0) can't run here: there is no such card\n"
            "Type `fsdp list` to see which strategies can.",
        ),
        (
            "return 1 / 0",
            "BrokenStrategyError: strategy 'choosy' can't say whether it runs here: "
            "the probe of choosy-plugin 1.0 failed: ZeroDivisionError: division by zero\n"
            "Report this to the authors of choosy-plugin, or type: pip install --upgrade choosy-plugin",
        ),
        (
            "return True",
            "BrokenStrategyError: strategy 'choosy' can't say whether it runs here: the probe of choosy-plugin 1.0 "
            "failed: TypeError: choosy_probe:here returned a bool instead of None or a string\n"
            "Report this to the authors of choosy-plugin, or type: pip install --upgrade choosy-plugin",
        ),
    ],
    ids=["reason", "raises", "nonsense"],
)
def test_a_strategy_whose_probe_says_no(site: Site, probe: str, message: str) -> None:
    site.provide(
        "choosy-plugin",
        f'name="choosy", trainer="math:floor", probe="choosy_probe:here", {CPU}',
        choosy_probe=f"def here():\n    {probe}",
    )
    assert error(site, "choosy") == message


def test_requirements_are_checked_before_the_probe(site: Site) -> None:
    site.distribution("too-old", version="1.2")
    site.distribution("vendors-build", version="2.9.0a0+vendor25")
    requires = {
        "absent": '"no-such-package>=1"',
        "old": '"too-old>=1.3,<2"',
        "elsewhere": """'no-such-package; sys_platform == "nowhere"'""",
        "vendor": '"vendors-build>=2.9"',
        "wrong": '"what is this"',
    }
    probe = 'probe="choosy_probe:here"'
    site.provide(
        "choosy-plugin",
        *(f'name={name!r}, trainer="math:floor", requires=[{text}], {probe}, {CPU}' for name, text in requires.items()),
        choosy_probe="def here():\n    return 'the probe was asked'",
    )
    done = site.python("""
        from fsdp_core.plugins import registry
        for name in ("absent", "old", "elsewhere", "vendor"):
            print(registry.unavailable(name))
        print(failure(lambda: registry.unavailable("wrong")).splitlines()[0])
    """)
    *lines, wrong = done.stdout.splitlines()
    assert lines == [
        'it needs no-such-package>=1, which is not installed; type: pip install "no-such-package>=1"',
        'it needs too-old<2,>=1.3, but 1.2 is installed; type: pip install "too-old<2,>=1.3"',
        "the probe was asked",
        "the probe was asked",
    ]
    assert wrong.startswith(
        "BrokenStrategyError: strategy 'wrong' can't say whether it runs here: "
        "the probe of choosy-plugin 1.0 failed: InvalidRequirement: "
    )


def test_a_front_end_that_the_strategy_lacks(site: Site) -> None:
    site.provide("half-plugin", f'name="half", trainer="a:B", {CPU}')
    site.provide("both-plugin", f'name="both", trainer="a:B", fabric="a:B", {CPU}')
    assert error(site, "half", "fabric") == (
        "UnsupportedCapabilityError: strategy 'half' (half-plugin 1.0) has no class for lightning.fabric.Fabric, "
        "only one for lightning.pytorch.Trainer.\n"
        "Use lightning.pytorch.Trainer(strategy='half'), or here one of: both."
    )


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module:Class", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("math:Class", "AttributeError: module 'math' has no attribute 'Class'"),
    ],
)
def test_an_implementation_that_cannot_be_imported(site: Site, target: str, message: str) -> None:
    site.provide("hollow-plugin", f'name="hollow", fabric="{target}", {CPU}')
    assert error(site, "hollow", "fabric") == (
        f"BrokenStrategyError: strategy 'hollow' (hollow-plugin 1.0) can't be imported from {target!r}: {message}\n"
        "Fix it, or type: pip install --upgrade --force-reinstall hollow-plugin"
    )


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"^no front end called 'lightning'\.\nGive 'trainer' or 'fabric'\.$"):
        fsdp_core.resolve("fsdp2", "lightning")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^a strategy's name is a string, not a NoneType\.\nType `fsdp list` to see"):
        fsdp_core.describe(None)  # type: ignore[arg-type]


def test_importing_fsdp_core_imports_next_to_nothing(site: Site) -> None:
    site.python("""
        import sys
        before = set(sys.modules)
        import fsdp_core
        assert set(sys.modules) - before <= {"fsdp_core", "__future__"}, set(sys.modules) - before
        assert set(fsdp_core.__all__) <= set(dir(fsdp_core))
        heavy = {"AccumulatedGradients", "Backend", "ProcessGroupRuntime", "RandomState", "ReduceOp", "Runtime"}
        heavy |= {"Sharded", "full_state_dict", "gathered", "load_state_dict", "wrap"}
        heavy |= {"SentWeights", "stream_weights"}
        heavy |= {"gather_sequence", "sequence_positions", "shift_labels", "token_mean"}
        light = set(fsdp_core.__all__) - heavy
        for name in light:
            getattr(fsdp_core, name)
        assert not {"torch", "lightning", "numpy"} & set(sys.modules)
        assert fsdp_core.__version__[0].isdigit()
        assert "module 'fsdp_core' has no attribute 'strategy'" in failure(lambda: fsdp_core.strategy)
    """)


def test_every_error_is_public() -> None:
    from fsdp_core import errors

    assert set(errors.__all__) <= set(fsdp_core.__all__)
    assert all(issubclass(getattr(fsdp_core, name), errors.FSDPError) for name in errors.__all__)
