"""``/start_profile`` and ``/stop_profile`` with SGLang's fields (SPEC T1)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from flashrec.profiler import ProfileOptions
from flashrec.server.paths import resolve_inside
from flashrec.server.schemas import MAX_TOKEN_ID, Body
from flashrec.server.unused import UnusedFlag, UnusedList


def _from_digits(value: object) -> object:
    """``sglang.bench_serving`` sends its step counts as strings."""
    return int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 10 else value


Steps = Annotated[
    int,
    Field(ge=1, le=MAX_TOKEN_ID),
    BeforeValidator(
        _from_digits,
        json_schema_input_type=Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)]
        | Annotated[str, Field(pattern="^0{0,8}[1-9][0-9]{0,8}$", max_length=9)],
    ),
]


class StartProfileRequest(Body):
    """The body of ``/start_profile``; an empty body asks for the defaults."""

    output_dir: str | None = None
    start_step: Steps | None = None
    num_steps: Steps | None = None
    activities: list[Literal["CPU", "GPU"]] | None = None
    profile_by_stage: bool | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_id: str | None = None
    profile_prefix: str | None = None
    merge_profiles: UnusedFlag = None
    profile_stages: UnusedList = None
    detailed_annotations: UnusedFlag = None


def profile_options(body: StartProfileRequest, root: Path) -> ProfileOptions:
    """Options whose directory lies inside ``root``. Raises :class:`RequestError`."""
    default = ProfileOptions(output_dir=root)
    return ProfileOptions(
        output_dir=resolve_inside(root, body.output_dir, field="output_dir", setting="FLASHREC_TORCH_PROFILER_DIR"),
        num_steps=body.num_steps,
        start_step=body.start_step,
        activities=tuple(body.activities) if body.activities else default.activities,
        with_stack=default.with_stack if body.with_stack is None else body.with_stack,
        record_shapes=default.record_shapes if body.record_shapes is None else body.record_shapes,
        profile_by_stage=bool(body.profile_by_stage),
        profile_prefix=body.profile_prefix or None,
        profile_id=body.profile_id or default.profile_id,
    )
