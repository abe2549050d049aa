"""What one can do here: ``nox -s NAME`` does it, with words after ``--``. Without a name, those with a star are run.

tools/environments.py makes the environments, in ``.nox/``, and says what a package's pyproject may ask for;
tools/suites.py runs pytest in them.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent))  # `nox` does not look here, and `python -m nox` where it is typed

from tools import environments as envs
from tools import newest_releases, steps
from tools.environments import PACKAGES, PINNED_APART, ROOT, SHARING
from tools.suites import (
    CLAUSES_SIDE_BY_SIDE,
    CORE,
    SEED,
    SMOKE,
    choose_packages,
    rehearse_run_on_card,
    run_clauses,
    run_folder,
    run_on_device,
    run_package,
    run_random_steps,
)

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "tests"]

# Containers often forbid Python to keep what it has compiled. Torch and Lightning are 2,000 modules, which each of the
# thousands of processes that the tests start would compile again: 5 of the 8 seconds that importing them then takes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

OPTIMIZERS = ("pytorch-optimizer", "schedulefree", "timm", "torchao", "transformers")  # of docs/optimizers.md
# What the examples of docs/transformers.md import. Not among those: transformers imports torchvision where it is, which
# timm brings, and its wheels on the package index can't be imported beside torch's build for CPUs.
TRANSFORMERS = ("accelerate", "peft", "transformers")
# Lightning imports matplotlib where it is, which takes a tenth of a second of every process that the tests start.
TOOLS = ("mypy", "sphinx", "furo", "myst-parser", "matplotlib")


@nox.session(python=False)
def lint(session: nox.Session) -> None:
    """Check style, imports, docstrings and format by ruff; `-- --fix` mends what it can."""
    ruff = (envs.make_third_party(session), "-m", "ruff")
    fix = "--fix" in session.posargs
    session.run(*ruff, "check", *(["--fix"] if fix else []))
    session.run(*ruff, "format", *([] if fix else ["--check", "--diff"]))


@nox.session(python=False)
def typecheck(session: nox.Session) -> None:
    """Check the types of every package's sources by mypy, strictly."""
    sources = [f"{package.path}/src" for package in PACKAGES.values()]
    session.run(envs.make_layer(session, "tools", SHARING, *TOOLS), "-m", "mypy", *sources, *session.posargs)


@nox.session(python=False)
def tests(session: nox.Session) -> None:
    """Run all that is fast, of every package, in ten minutes; `-- fsdp-xla -k clip` chooses, and words go to pytest."""
    chosen, words = choose_packages(session)
    part = "all" if words else "tests"
    run = {f"tests of {p.name}": partial(run_package, session, p, part, *words, pairs=4) for p in chosen}
    done = steps.run_steps(session, run)
    ran = steps.show_costs([f"{package.name}-{part}" for package in chosen], is_whole=not words)
    steps.fail_if_one_has(session, done)
    if not ran:
        session.error(f"no test is called so: {' '.join(words)}")
    if len(chosen) == len(PACKAGES) and not words:
        steps.check_budget(session, done)


@nox.session(python=False)
def everything(session: nox.Session) -> None:
    """Run what `tests` leaves out: other parameters, meshes, pairs, launchers, versions, types, pages, wheels."""
    run = {
        f"rest of {package.name}": partial(run_package, session, package, "everything", pairs=package.pairs)
        for package in PACKAGES.values()
    }
    run |= {part.name: partial(part, session) for part in (integration, launchers, versions, typecheck, docs, build)}
    run["card"] = partial(rehearse_run_on_card, session, "--turn", SEED)
    run["device"] = partial(run_on_device, session, "fake", in_short=True)
    steps.fail_if_one_has(session, steps.run_steps(session, run))


@nox.session(python=False)
def dev(session: nox.Session) -> None:
    """Make `.nox/dev`, which has every package that shares the pins, editable, to work by hand."""
    session.log(envs.make_layer(session, "dev", SHARING))


@nox.session(python=False)
def conformance(session: nox.Session) -> None:
    """Run the whole suite of every strategy and preset, with all parameters, in an hour; words go to pytest."""
    run = {}
    for package in PACKAGES.values():
        files = [f"{package.path}/tests/test_conformance.py"]
        files += map(str, sorted(ROOT.glob(f"{package.path}/tests/slow_conformance_*.py")))
        if package.strategies:
            python = envs.make_tests_environment(session, package)
            words = (*CLAUSES_SIDE_BY_SIDE, *files, *session.posargs)
            run[package.name] = partial(session.run, python, "-m", "pytest", *words, success_codes=[0, 5])
    steps.fail_if_one_has(session, steps.run_steps(session, run))


@nox.session(python=False, name="steps")
def steps_at_random(session: nox.Session) -> None:
    """Compose 300 steps at random, under `fsdp2` and `fsdp_native`; `-- fsdp2 --seed 5 --count 30` chooses."""
    run_random_steps(session)


@nox.session(python=False)
def minimums(session: nox.Session) -> None:
    """Run the core of the conformance suite on the oldest torch, Lightning and others that the packages allow."""
    run_clauses(session, envs.make_oldest(session), CORE, *CLAUSES_SIDE_BY_SIDE)


@nox.session(python=False)
def newest(session: nox.Session) -> None:
    """Run the same on the newest, `-- --pre`: not released; `-- torch==X` where CPU builds of torch stop earlier."""
    newest_releases.try_newest(session, envs.make_newest(session))


@nox.session(python=False)
def versions(session: nox.Session) -> None:
    """Run a few clauses of it on the oldest, and on the newest."""
    for python in (envs.make_oldest(session), envs.make_newest(session)):
        run_clauses(session, python, SMOKE)  # workers would take longer to start than their clauses


@nox.session(python=False)
def integration(session: nox.Session) -> None:
    """Test the packages as users get them, built and installed as wheels: `tests-integration/`."""
    python = envs.make_layer_of_wheels(session, "integration", "safetensors")  # to read what is consolidated
    for package in PINNED_APART:
        session.env[package.python_variable] = envs.make_tests_environment(session, package)
    session.env["FSDP_TESTS_APART"] = envs.make_folder_apart(session, "integration-apart", *OPTIMIZERS)
    session.env["FSDP_TESTS_TRANSFORMERS"] = envs.make_folder_apart(session, "integration-transformers", *TRANSFORMERS)
    run_folder(session, python, "integration", "tests-integration", "--ignore=tests-integration/launchers")


@nox.session(python=False)
def launchers(session: nox.Session) -> None:
    """Run the scripts of docs/many-machines.md under engines that launch them: `tests-integration/launchers/`."""
    python = envs.make_layer_of_wheels(session, "launchers", "boto3", "ipykernel", "moto[server]", "ray[train]", "s3fs")
    run_folder(session, python, "launchers", "tests-integration/launchers")


@nox.session(python=False)
def example(session: nox.Session) -> None:
    """Run the whole suite over strangers' packages, `tests-integration/example-backend/` and `example-zero2/`."""
    python = envs.make_layer(session, "example", [PACKAGES["fsdp-core"]])
    for folder in (folders := ("tests-integration/example-backend", "tests-integration/example-zero2")):
        envs.install_with_uv(session, python, "--no-deps", "--no-build-isolation", f"--editable=./{folder}")
    for folder in folders:  # one after the other, for the files have one name
        session.run(python, "-m", "pytest", *CLAUSES_SIDE_BY_SIDE, f"{folder}/tests", *session.posargs)
    session.run(python, "-m", "pytest", "tests-integration/example-tests", *session.posargs, success_codes=[0, 5])


@nox.session(python=False)
def hardware(session: nox.Session) -> None:
    """Test on devices: `-- xla` on a TPU VM, `-- cuda` on a machine with GPUs, `-- fake`, or another kind."""
    devices, words = session.posargs[:1], session.posargs[1:]
    if devices == ["xla"]:
        envs.check_tpus(session)
        package = PACKAGES["fsdp-xla"]
        python = envs.make_tests_environment(session, package, "torch_xla[tpu]", name="fsdp-xla-tpu")
        settings = {"PJRT_DEVICE": "TPU", "FSDP_XLA_TESTS_ON": "TPU", "CPU_NUM_DEVICES": None}
        session.run(python, "-m", "pytest", f"{package.path}/tests/test_everywhere.py", *words, env=settings)
    elif devices == ["cuda"]:
        gpus = envs.count_gpus(session)
        python = envs.make_layer(session, "hardware", SHARING, "torchao", *TRANSFORMERS)
        out = [] if "--out" in words else ["--out", envs.name_new_folder("gpu-run")]
        session.run(python, "tests-integration/gpu/run.py", "--installed", *out, *words)
        if gpus >= 4:  # as many as the suites start ranks
            for name in ("fsdp-fsdp2", "fsdp-cuda-native"):  # one after the other, for the files have one name
                suite = f"{PACKAGES[name].path}/tests/test_conformance.py"
                session.run(python, "-m", "pytest", suite, env={"FSDP_TESTS_ACCELERATOR": "cuda"})
        else:
            session.log(f"The whole suites need 4 GPUs, and {gpus} are here: ranks have shared them")
    elif devices:
        run_on_device(session, devices[0], *CLAUSES_SIDE_BY_SIDE, *words)
    else:
        session.error("type python -m nox -s hardware -- xla, -- cuda, -- fake, or a vendor's kind, such as -- npu")


@nox.session(python=False)
def card(session: nox.Session) -> None:
    """Rehearse the run on a GPU, on the CPU: packed, Python 3.12, torch 2.11; words after `--` go to the run."""
    rehearse_run_on_card(session, *session.posargs)


@nox.session(python=False)
def docs(session: nox.Session) -> None:
    """Write the pages into `docs/_build/html` by Sphinx, where warnings are errors, and run their examples."""
    python = envs.make_layer(session, "tools", SHARING, *TOOLS)
    sphinx = ("sphinx", "--fresh-env", "--fail-on-warning", "--keep-going", "--quiet", "--builder", "html")
    session.run(python, "-m", *sphinx, "docs", "docs/_build/html")
    # Rather than Sphinx's own doctest builder. Those of the sources are run with each package's tests.
    pytest = ("pytest", "--quiet", "--doctest-glob=*.md", "--ignore=docs/examples", "--ignore=docs/_build")
    session.run(python, "-m", *pytest, "docs")
    session.log(f"Open {ROOT / 'docs/_build/html/index.html'}")


@nox.session(python=False)
def demo(session: nox.Session) -> None:
    """Train on two CPU processes, resume on one, and draw it; `-- --quick`, or `--strategy xla_fsdp` (also `_spmd`)."""
    python = envs.make_layer(session, "tools", SHARING, *TOOLS)
    for package in PINNED_APART:
        if any(word.startswith(tuple(package.strategies)) for word in session.posargs):
            session.env[package.python_variable] = envs.make_tests_environment(session, package)
    session.run(python, "docs/examples/demo.py", *session.posargs)


@nox.session(python=False)
def bench(session: nox.Session) -> None:
    """Measure time and memory beside hand-written loops, as a table; `-- --xla` measures fsdp-xla."""
    if "--xla" in session.posargs:
        script, python = "xla.py", envs.make_tests_environment(session, PACKAGES["fsdp-xla"])
    else:
        script, python = "run.py", envs.make_layer(session, "dev", SHARING)
    session.run(python, f"tests-integration/benchmarks/{script}", *session.posargs)


@nox.session(python=False)
def build(session: nox.Session) -> None:
    """Build wheels and sdists into `dist/`, install them into a clean environment and list the strategies' names."""
    wheels = envs.build_wheels(session)
    python = envs.make_clean(session, "build")
    list_names = (str(Path(python).parent / "fsdp"), "list")
    envs.install_with_uv(session, python, *(wheel for wheel in wheels if "fsdp_core-" in wheel))
    session.log("fsdp-core alone: no torch, no strategy, and the command says what to install")
    session.run(*list_names)
    envs.install_with_uv(session, python, "torch", "lightning", *wheels)
    session.run(*list_names)
    listing = json.loads(str(session.run(*list_names, "--json", silent=True)))["strategies"]
    missing = {name for package in SHARING for name in package.strategies} - {row["name"] for row in listing}
    if missing:
        session.error(f"the wheels are installed, but `fsdp list` does not name {', '.join(sorted(missing))}")
