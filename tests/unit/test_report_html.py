"""``report.html`` needs no network, escapes what it shows, and says the verdict first."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from report_samples import HOSTILE, plot, report

from flashrec_harness.outcome import Check, Outcome, Plot, Series
from flashrec_harness.report import html, svg


class Tags(HTMLParser):
    """Collects tags and attributes, and complains about one that is closed without being open."""

    VOID = frozenset({"meta", "rect", "line", "circle", "polyline", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    return tags


def test_page_is_self_contained_and_well_formed() -> None:
    text = html.render(report())
    tags = parsed(text)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags.seen}
    loaded = [v for _, attrs in tags.seen for k, v in attrs.items() if k in ("src", "href", "srcset")]
    assert [target for target in loaded if not (target or "").startswith("#")] == []
    assert {target.removeprefix("#") for target in loaded if target} <= {a["id"] for _, a in tags.seen if "id" in a}
    assert "url(" not in text
    assert "@import" not in text
    assert not re.search(r"https?://", text)


def test_text_from_outside_is_escaped() -> None:
    text = html.render(report())
    assert HOSTILE not in text
    assert "&lt;script&gt;" in text


def test_title_is_the_verdict_with_what_is_missing() -> None:
    title = re.search(r"<title>(.*?)</title>", html.render(report()), re.DOTALL)
    assert title is not None
    assert title[1].startswith("FAIL: 1 of 6, INVALID: 1 of 6")
    assert "INCOMPLETE: 1 of 6 not run" in title[1]


def test_verdict_stands_before_red_checks_and_those_before_suites() -> None:
    text = html.render(report())
    places = [text.index(part) for part in ("<h1>", "What needs you", 'id="parity"', "Environment")]
    assert places == sorted(places)
    red = text[places[1] : places[2]]
    assert red.index("float32 against SGLang") < red.index("measurement is valid")
    assert "--seed 7" in red


def test_nothing_needs_you_when_all_pass() -> None:
    assert "What needs you" not in html.render(report({"s": [Check("s", "c", Outcome.PASS, "fine")]}))


def test_what_was_not_judged_is_grouped_by_its_reason() -> None:
    missing = [Check("trace", name, Outcome.NOT_RUN, "", reason="no GPU") for name in ("spans", "stalls")]
    text = html.render(report({"trace": [*missing, Check("trace", "file", Outcome.PASS, "")]}))
    (section,) = re.findall(r"What was not judged</h2>(.*?)</section>", text, re.DOTALL)
    assert section.count("no GPU") == 1
    assert "2 checks" in section
    assert "trace: spans; trace: stalls" in " ".join(section.split())
    assert "What was not judged" not in html.render(report({"s": [Check("s", "c", Outcome.PASS, "fine")]}))


def test_a_red_check_says_what_its_outcome_means_how_to_repeat_it_and_where_its_evidence_is() -> None:
    check = Check("parity", "lists", Outcome.FAIL, "1 of 2", rows=[{"rank": 1}], repeat="again", bundles=["a b.json"])
    text = html.render(report({"parity": [check]}))
    assert "a fault was found" in text
    card = text[text.index("What needs you") : text.index("whole")]
    for part in ("again", "repro &#39;a b.json&#39;", 'href="#parity-lists"'):
        assert part in card
    assert re.search(r'<details class="check" id="parity-lists" open>', text)


def test_another_process_on_the_device_is_named_at_the_top() -> None:
    run = report()
    assert "also on the device" not in html.render(run)
    run.environment.info["other processes on the device"] = ["4711 python"]
    text = html.render(run)
    assert "4711 python" in text[text.index("<h1>") : text.index("What needs you")]


def test_both_colour_schemes_and_narrow_screens_are_styled() -> None:
    text = html.render(report())
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text


def test_a_plot_marks_every_point_inside_its_frame() -> None:
    tags = parsed(svg.render(plot()))
    circles = [attrs for tag, attrs in tags.seen if tag == "circle"]
    assert len(circles) == 6
    assert all(0 <= float(c["cx"] or -1) <= 640 and 0 <= float(c["cy"] or -1) <= 280 for c in circles)


def test_higher_values_stand_higher() -> None:
    tags = parsed(svg.render(Plot("t", "x", "y", [Series("s", [0, 1, 2], [1.0, 5.0, 3.0])])))
    heights = [float(attrs["cy"] or 0) for tag, attrs in tags.seen if tag == "circle"]
    assert heights[1] < heights[2] < heights[0]


def test_log_axis_spaces_decades_evenly_and_drops_what_it_cannot_show() -> None:
    tags = parsed(svg.render(Plot("t", "x", "y", [Series("s", [0, 1, 2, 3], [1, 10, 100, 0])], log_y=True)))
    heights = [float(attrs["cy"] or 0) for tag, attrs in tags.seen if tag == "circle"]
    assert len(heights) == 3
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)


def test_empty_and_constant_data_can_be_drawn() -> None:
    parsed(svg.render(Plot("t", "x", "y", [Series("s", [], [])])))
    parsed(svg.render(Plot("t", "x", "y", [Series("s", [1], [0.0], style="bars")], x_ticks=["a"])))
    parsed(svg.render(Plot("t", "x", "y", [Series("s", [1, 1], [2.0, 2.0], style="line")])))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.93, 1.07, [0.95, 1.0, 1.05]), (-1, 1, [-1, -0.5, 0, 0.5, 1]), (3, 3, [3])],
)
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float]) -> None:
    assert svg.nice_ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (True, "yes"),
        (3, "3"),
        (12345, "12,345"),
        (0.123456, "0.1235"),
        (54321.9, "54,322"),
        ([1, 2], "1, 2"),
    ],
)
def test_cells_are_short(value: object, text: str) -> None:
    assert html.format_cell(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(2.04, "2.0 s"), (95.2, "1 min 35 s"), (3725, "1 h 2 min")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert html.format_duration(seconds) == text
