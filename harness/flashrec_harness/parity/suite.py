"""The parity suite: one check per reference, score space and kind of search."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flashrec.errors import ConfigError
from flashrec_harness import hardware
from flashrec_harness.checkpoints.fp8 import quantized_copy
from flashrec_harness.environment import model_digest
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.parity import plan
from flashrec_harness.parity.answers import Absence, Answers, ask_oracle, ask_sglang, asked
from flashrec_harness.parity.comparison import SUITE
from flashrec_harness.parity.edge_catalogs import edge_ground
from flashrec_harness.parity.ground import Ground, context_ground
from flashrec_harness.parity.overview import overview
from flashrec_harness.parity.plan import Group, Reference
from flashrec_harness.parity.served import served_subject
from flashrec_harness.parity.subjects import EngineSubject, JudgedSearcher
from flashrec_harness.parity.verdicts import Bench, judge_subject, references_agree
from flashrec_harness.planting import planted_names
from flashrec_harness.references.dequantized import is_fp8
from flashrec_harness.references.hugging_face import TransformersReference
from flashrec_harness.references.types import Tokens

Agenda = Callable[[Callable[[Tokens, int], Tokens]], list[Group]]
"""The groups, given what a search is likely to emit."""


def run(ctx: SuiteContext) -> list[Check]:
    """Compare the engine with SGLang, ``transformers`` and the float64 oracle.

    The checkpoint of ``ctx`` is searched freely and in its own catalog, in float32 on the CPU and, where
    there is a GPU, as it is served there; with its weights quantised to FP8 as well, in fewer searches. Catalogs
    of unusual shapes come with a small checkpoint that is made for the run. Its weights are random, so that rounding
    to bfloat16 would decide its choices: a GPU searches it in float32. ``ctx.url`` judges that server instead; its
    checkpoint and catalog must be ``ctx``'s.
    Raises :class:`ConfigError` where ``ctx.only`` leaves nothing.
    """
    sizes = plan.QUICK if ctx.quick else plan.FULL
    ground = context_ground(ctx)

    def checkpoint_agenda(likely: Callable[[Tokens, int], Tokens]) -> list[Group]:
        return plan.narrowed(plan.checkpoint_groups(ground, sizes, ctx.seed, likely), ctx.only)

    def fp8_agenda(likely: Callable[[Tokens, int], Tokens]) -> list[Group]:
        groups = plan.checkpoint_groups(ground, plan.QUICK, ctx.seed, likely)
        return plan.narrowed(plan.without(Reference.SGLANG, groups), ctx.only)

    if ctx.url is not None:
        checks = _judge_one(ground, checkpoint_agenda, served_subject(ctx.url), ctx.out_dir)
    else:
        checks = judge(ground, checkpoint_agenda, engines(ground, "bfloat16"), ctx.out_dir)
        if not is_fp8(ground.model_path):
            checks += _judge_one(ground, fp8_agenda, _fp8_engine(ground), ctx.out_dir)
    if ground.left_out:
        checks.append(Check(SUITE, "searches in the catalog", Outcome.NOT_RUN, "nothing was compared", ground.left_out))
    if ctx.url is not None:
        return [*overview(checks), *checks]
    edge = edge_ground(ctx.out_dir / "edge", ctx.seed)
    groups = plan.narrowed(plan.edge_groups(edge, sizes, ctx.seed), ctx.only)
    checks += judge(edge, lambda _: groups, engines(edge, "float32"), ctx.out_dir)
    if not checks:
        raise ConfigError(f"--only {ctx.only}: no comparison has that in its name, as in 'float64 oracle, sid'")
    return [*overview(checks), *checks]


def engines(ground: Ground, gpu_dtype: str) -> list[JudgedSearcher]:
    """The engine here in float32 and, where there is a GPU, on it in ``gpu_dtype``."""
    found: list[JudgedSearcher] = [EngineSubject(ground, **_proof())]
    gpu = hardware.visible_gpu()
    if gpu is not None:
        label = f"{gpu_dtype} on {gpu.name}"
        # Float32 attention on a GPU is plain PyTorch, whose bits depend on the batch: its proof would refuse to start.
        proof = {"invariance_check": False} if gpu_dtype == "float32" else _proof()
        found.append(EngineSubject(ground, device="cuda", dtype=gpu_dtype, label=label, **proof))
    return found


def _fp8_engine(ground: Ground) -> JudgedSearcher:
    """The engine that quantises the weights as it loads them, on a GPU if there is one."""
    gpu = hardware.visible_gpu()
    where = {} if gpu is None else {"device": "cuda", "dtype": "bfloat16"}
    label = "FP8" if gpu is None else f"FP8 on {gpu.name}"
    return EngineSubject(ground, quantization="fp8", label=label, **where, **_proof())


def _proof() -> dict[str, Any]:
    """The engine's own proof at start would refuse some planted faults before they are judged."""
    return {"invariance_check": False} if planted_names() else {}


def _judge_one(ground: Ground, agenda: Agenda, subject: JudgedSearcher, out_dir: Path) -> list[Check]:
    """Judge ``subject`` by references that have the weights it multiplies with: an FP8 engine's are quantised."""
    if not subject.fp8 or is_fp8(ground.model_path):
        return judge(ground, agenda, [subject], out_dir)
    with TemporaryDirectory(prefix="flashrec-fp8-") as directory:
        quantized = quantized_copy(ground.model_path, Path(directory) / ground.model_path.name)
        return judge(replace(ground, model_path=quantized), agenda, [subject], out_dir)


def judge(ground: Ground, agenda: Agenda, subjects: Sequence[JudgedSearcher], out_dir: Path) -> list[Check]:
    """Ask every side in turn, so that no two hold the weights at once, and compare."""
    before = model_digest(ground.model_path)
    reference = TransformersReference(ground.model_path, ground.grammar_of)
    groups = agenda(reference.likely)
    if not groups:
        return []
    answers = {Reference.TRANSFORMERS: asked(reference, plan.cases_for(groups, Reference.TRANSFORMERS))}
    del reference
    ours = [_ask_subject(subject, groups) for subject in subjects]
    gc.collect()
    answers[Reference.SGLANG] = ask_sglang(ground, plan.cases_for(groups, Reference.SGLANG), out_dir)
    answers[Reference.ORACLE], oracle = ask_oracle(ground, plan.cases_for(groups, Reference.ORACLE))
    if model_digest(ground.model_path) != before:
        return [_changed(ground)]
    bench = Bench(ground, groups, answers, oracle, out_dir)
    checks = [
        check for subject, lists in zip(subjects, ours, strict=True) for check in judge_subject(bench, subject, lists)
    ]
    return [*checks, *references_agree(bench)]


def _changed(ground: Ground) -> Check:
    reason = "its files changed while the sides loaded them in turn; run again"
    return Check(SUITE, f"checkpoint as it was, {ground.name}", Outcome.INVALID, "nothing was compared", reason)


def _ask_subject(subject: JudgedSearcher, groups: Sequence[Group]) -> Answers:
    """The subject's answers; where it cannot answer, why."""
    cases = plan.cases_for(groups)
    answers = asked(subject, [case for case in cases if not subject.refusal(case)])
    for case in cases:
        if reason := subject.refusal(case):
            answers.lack([case], Absence(Outcome.NOT_RUN, reason))
    return answers
