"""The parity suite: one check per reference, score space and kind of search."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.parity import plan
from flashrec_harness.parity.answers import Answers, ask_oracle, ask_sglang, asked
from flashrec_harness.parity.compare import Explain
from flashrec_harness.parity.comparison import SUITE, Comparison
from flashrec_harness.parity.edge_catalogs import edge_ground
from flashrec_harness.parity.evidence import save_evidence
from flashrec_harness.parity.ground import Ground, context_ground
from flashrec_harness.parity.plan import Group, Reference
from flashrec_harness.parity.subjects import EngineSubject, HttpSubject, JudgedSearcher
from flashrec_harness.references.hugging_face import TransformersReference
from flashrec_harness.references.types import Tokens

Agenda = Callable[[Callable[[Tokens, int], Tokens]], list[Group]]
"""The groups, given what a search is likely to emit."""

OpenSubject = Callable[[], JudgedSearcher]


def run(ctx: SuiteContext) -> list[Check]:
    """Compare the engine with SGLang, ``transformers`` and the float64 oracle, in float32 on the CPU.

    The checkpoint of ``ctx`` is searched freely and in its own catalog. Catalogs of unusual shapes come with
    a small checkpoint that is made for the run. ``ctx.url`` judges that server instead of the engine here;
    its checkpoint and catalog must be those of ``ctx``.
    """
    sizes = plan.QUICK if ctx.quick else plan.FULL
    ground = context_ground(ctx)
    url = ctx.url
    if url is not None:
        return _judge_checkpoint(ground, sizes, ctx, lambda: HttpSubject(url))
    checks = _judge_checkpoint(ground, sizes, ctx, lambda: EngineSubject(ground))
    edge = edge_ground(ctx.out_dir / "edge", ctx.seed)
    agenda: Agenda = lambda _: plan.edge_groups(edge, sizes, ctx.seed)  # noqa: E731
    return checks + judge(edge, agenda, lambda: EngineSubject(edge), ctx.out_dir)


def _judge_checkpoint(ground: Ground, sizes: plan.Sizes, ctx: SuiteContext, open_subject: OpenSubject) -> list[Check]:
    agenda: Agenda = lambda likely: plan.checkpoint_groups(ground, sizes, ctx.seed, likely)  # noqa: E731
    return judge(ground, agenda, open_subject, ctx.out_dir)


def judge(ground: Ground, agenda: Agenda, open_subject: OpenSubject, out_dir: Path) -> list[Check]:
    """Ask every side in turn, so that no two hold the weights at once, and compare."""
    reference = TransformersReference(ground.model_path, ground.grammar_of)
    groups = agenda(reference.likely)
    subject = open_subject()
    groups, checks = _answerable(groups, subject)
    answers = {Reference.TRANSFORMERS: asked(reference, plan.cases_for(groups, Reference.TRANSFORMERS))}
    del reference
    gc.collect()
    ours = asked(subject, plan.cases_for(groups))
    gc.collect()
    answers[Reference.SGLANG] = ask_sglang(ground, plan.cases_for(groups, Reference.SGLANG), out_dir)
    answers[Reference.ORACLE], explain = ask_oracle(ground, plan.cases_for(groups, Reference.ORACLE))
    for group in groups:
        for name in group.references:
            comparison = _compare(group, name, ours, answers[name], explain)
            if isinstance(comparison, Comparison):
                check = comparison.check()
                check.summary += answers[name].note
                save_evidence(comparison, check, subject, out_dir)
                checks.append(check)
            else:
                checks.append(comparison)
    return [*checks, *references_agree(ground.name, groups, answers, explain)]


def _compare(
    group: Group, reference: Reference, ours: Answers, theirs: Answers, explain: Explain | None
) -> Comparison | Check:
    absence = theirs.absence(group.cases)
    if absence is not None:
        return Check(SUITE, group.name(reference), absence.outcome, "nothing was compared", absence.reason)
    lists = ours.lists(group.cases), theirs.lists(group.cases)
    return Comparison.of(group.name(reference), group.cases, *lists, explain)


def _answerable(groups: Sequence[Group], subject: JudgedSearcher) -> tuple[list[Group], list[Check]]:
    """The groups cut to what ``subject`` can answer, and a check for each group of which nothing is left."""
    kept: list[Group] = []
    checks: list[Check] = []
    for group in groups:
        refusals = [subject.refusal(case) for case in group.cases]
        cases = tuple(case for case, no in zip(group.cases, refusals, strict=True) if not no)
        if cases:
            kept.append(replace(group, cases=cases))
        else:
            names = (group.name(reference) for reference in group.references)
            checks += [Check(SUITE, name, Outcome.NOT_RUN, "nothing was compared", refusals[0]) for name in names]
    return kept, checks


def references_agree(
    title: str, groups: Sequence[Group], answers: dict[Reference, Answers], explain: Explain | None
) -> list[Check]:
    """SGLang against ``transformers`` on the searches that both answered.

    If the references do not agree, what was measured with them means nothing: *invalid*, not a failure.
    """
    sglang, transformers = answers[Reference.SGLANG], answers[Reference.TRANSFORMERS]
    cases = [case for case in plan.cases_for(groups) if case in sglang and case in transformers]
    if not cases:
        return []
    comparison = Comparison.of(
        f"{Reference.SGLANG} against {Reference.TRANSFORMERS}, {title}",
        cases,
        sglang.lists(cases),
        transformers.lists(cases),
        explain,
    )
    check = comparison.check(plots=False)
    if check.outcome is Outcome.FAIL:
        check.outcome = Outcome.INVALID
    return [check]
