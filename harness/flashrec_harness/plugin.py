"""The pytest plugin: suite markers, ``--require-gpu``, ``--model-path`` and the hypothesis profiles.

Missing hardware is a skip with its reason; with ``--require-gpu`` it is a failure, and so is a GPU session
in which no test ran (SPEC H3).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from flashrec_harness import drawing, hardware
from flashrec_harness.outcome import SuiteContext

SUITES = ("kernel", "parity", "determinism", "perf", "trace")
_ALONE = frozenset({"determinism", "perf", "trace"})

_MARKERS = {
    "kernel": "every device kernel equals its reference",
    "parity": "the same choices and scores as SGLang, transformers and the oracle",
    "determinism": "the same bits at temperature 0, across waves and processes",
    "perf": "noise-banded regression against stored baselines",
    "trace": "the device did what we think it did",
    "gpu": "needs a GPU: skipped without one, failed without one under --require-gpu",
    "slow": "takes more than about ten seconds",
    "alone": "measures how fast something is: other tests beside it would be measured too",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the harness; each has the same meaning in ``flashrec-harness``."""
    group = parser.getgroup("flashrec", "FlashRec validation harness")
    group.addoption(
        "--require-gpu",
        action="store_true",
        default=os.environ.get("FLASHREC_REQUIRE_GPU") == "1",
        help="missing GPU fails instead of skipping; a session in which no GPU test ran fails",
    )
    group.addoption("--strict-harness", action="store_true", help="a harness check that is not run fails its test")
    group.addoption("--model-path", type=Path, help="checkpoint to judge (default: the bundled tiny shop)")
    group.addoption("--sid-vocab-file", type=Path, help="catalog (default: the one beside the checkpoint)")
    group.addoption("--sid", help="semantic-ID layout START:END/SIZE,SIZE,... where it cannot be inferred")
    group.addoption("--url", help="judge a server that is already running, as flashrec-harness --url does")
    group.addoption("--workload", help="perf workload: a name or a JSON file")
    group.addoption("--harness-seed", type=int, default=0, help="seed of the suites' random choices")
    group.addoption(
        "--hypothesis-budget",
        choices=drawing.BUDGETS,
        default=drawing.of_environment(),
        help="ci: the same examples each time; nightly: more, and new ones",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Pin an xdist worker's GPU, register markers, load the hypothesis profile."""
    hardware.pin_xdist_worker()
    for name, meaning in _MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    drawing.load(config.getoption("--hypothesis-budget"))
    config.pluginmanager.register(_GpuSession(config), "flashrec-gpu-session")


class _GpuSession:
    """Skips or fails GPU tests without a GPU, and counts the ones that ran."""

    def __init__(self, config: pytest.Config) -> None:
        self.required = bool(config.getoption("--require-gpu"))
        self.is_worker = hasattr(config, "workerinput")
        self.gpu_nodes: set[str] = set()
        self.ran = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Tests under ``tests/<suite>/`` carry the suite's marker."""
        for item in items:
            if item.path.parent.name in SUITES:
                item.add_marker(item.path.parent.name)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.get_closest_marker("gpu") is None or hardware.has_gpu():
            return
        if self.required:
            pytest.fail(f"--require-gpu: {hardware.missing_gpu_reason()}", pytrace=False)
        pytest.skip(hardware.missing_gpu_reason())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and not report.skipped and "gpu" in report.keywords:
            self.ran += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.required or self.is_worker or session.config.option.collectonly:
            return
        if self.ran == 0 and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.required and self.ran == 0:
            terminalreporter.write_line(
                "--require-gpu: no GPU test ran, so this session shows nothing", red=True, bold=True
            )


@pytest.fixture(scope="session")
def require_gpu(pytestconfig: pytest.Config) -> bool:
    """Whether this session must run on a GPU."""
    return bool(pytestconfig.getoption("--require-gpu"))


@pytest.fixture(scope="session")
def model_path(pytestconfig: pytest.Config) -> Path:
    """The checkpoint to judge: ``--model-path``, or the bundled tiny shop."""
    chosen: Path | None = pytestconfig.getoption("--model-path")
    if chosen is not None:
        return chosen
    from flashrec.assets import tiny_shop

    return tiny_shop()


@pytest.fixture
def suite_context(pytestconfig: pytest.Config, model_path: Path, tmp_path: Path, harness_seed: int) -> SuiteContext:
    """The quick form of a suite's context over ``--model-path``, writing below ``tmp_path``."""
    from flashrec_harness.targets import resolve_catalog

    return SuiteContext(
        model_path=model_path,
        sid_vocab_file=resolve_catalog(model_path, pytestconfig.getoption("--sid-vocab-file")),
        sid=pytestconfig.getoption("--sid"),
        url=pytestconfig.getoption("--url"),
        quick=True,
        require_gpu=bool(pytestconfig.getoption("--require-gpu")),
        seed=harness_seed,
        out_dir=tmp_path,
        workload=pytestconfig.getoption("--workload"),
    )


@pytest.fixture(scope="session")
def harness_seed(pytestconfig: pytest.Config) -> int:
    """``--harness-seed``."""
    return int(pytestconfig.getoption("--harness-seed"))


@pytest.fixture
def strict_harness(pytestconfig: pytest.Config) -> bool:
    """Whether ``not run`` counts as a failure."""
    return bool(pytestconfig.getoption("--strict-harness"))


@pytest.fixture(autouse=True)
def _alone_on_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Suites that measure run alone on their GPU."""
    alone = any(request.node.get_closest_marker(name) for name in _ALONE)
    with hardware.device_lock() if alone else nullcontext():
        yield
