"""The layout inferred from a tokenizer, and ``--sid``."""

from __future__ import annotations

import numpy as np
import pytest
from sid_files import codebook_tokens, make_tokenizer

from flashrec.errors import LayoutError
from flashrec.sid.layout import SidLayout, infer_layout


def test_onerec_family_with_begin_and_end_behind_the_codebooks() -> None:
    layout = infer_layout(make_tokenizer([*codebook_tokens((2, 3)), "<|sid_begin|>", "<|sid_end|>"]))
    assert layout.depth == 2
    assert layout.sizes == (2, 3)
    assert [book.tolist() for book in layout.codebooks] == [[10, 11], [12, 13, 14]]
    assert all(book.dtype == np.int32 for book in layout.codebooks)
    assert (layout.begin, layout.end) == (15, 16)
    assert layout.sid_tokens.tolist() == [10, 11, 12, 13, 14]
    assert layout.sid_tokens.dtype == np.int32


def test_codebooks_begin_and_end_may_stand_anywhere_in_any_order() -> None:
    added = ["<|sid_end|>", "<s_b_1>", "<s_a_1>", "<|sid_begin|>", "<s_b_0>", "<s_a_0>", "other"]
    layout = infer_layout(make_tokenizer(added))
    assert [book.tolist() for book in layout.codebooks] == [[15, 12], [14, 11]]
    assert (layout.begin, layout.end) == (13, 10)
    assert layout.token_ids((1, 0)) == (12, 14)
    assert layout.codes((12, 14)) == (1, 0)
    assert layout.codes((13, 12, 14, 10)) == (1, 0)
    assert layout.codes((14, 12)) is None
    assert layout.codes((12,)) is None


def test_minionerec_family_has_no_begin_and_no_end() -> None:
    layout = infer_layout(make_tokenizer(codebook_tokens((2, 2, 2), prefix="")))
    assert layout.sizes == (2, 2, 2)
    assert (layout.begin, layout.end) == (None, None)
    assert layout.text((1, 0, 1)) == "<a_1><b_0><c_1>"
    assert layout.parse("<a_1><b_0><c_1>") == (1, 0, 1)


def test_text_of_codes_tokenises_to_their_token_ids() -> None:
    tokenizer = make_tokenizer(["<|sid_begin|>", *codebook_tokens((12, 12, 12)), "<|sid_end|>"])
    layout = infer_layout(tokenizer)
    for sid in [(0, 0, 0), (1, 11, 10), (11, 1, 0)]:
        text = layout.text(sid)
        assert tokenizer.encode(text, add_special_tokens=False) == list(layout.token_ids(sid))
        assert layout.parse(text) == sid
        assert layout.parse(f"<|sid_begin|>{text}<|sid_end|>") == sid


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no token of level 0"),
        ("<s_a_0>", "no token of level 1"),
        ("<s_b_0><s_a_0>", "no token of level 0"),
        ("<s_a_0><s_b_9>", "no token of level 1"),
        ("<s_a_0><s_b_0><s_b_1>", "goes on after its 2 levels"),
    ],
)
def test_parse_says_where_a_text_goes_wrong(text: str, reason: str) -> None:
    layout = infer_layout(make_tokenizer(codebook_tokens((2, 2))))
    with pytest.raises(LayoutError, match=reason):
        layout.parse(text)


def test_a_code_out_of_range_names_level_and_code() -> None:
    layout = infer_layout(make_tokenizer(codebook_tokens((2, 3))))
    with pytest.raises(LayoutError, match=r"level 1 has codes 0 to 2, not 3"):
        layout.token_ids((0, 3))
    with pytest.raises(LayoutError, match=r"level 0 .* not -1"):
        layout.text((-1, 0))
    with pytest.raises(LayoutError, match=r"has 1 codes, the layout has 2 levels"):
        layout.token_ids((0,))


def test_the_catalogs_depth_cuts_the_codebooks_and_allows_an_end_level() -> None:
    with_end = make_tokenizer([*codebook_tokens((2, 3, 4)), "<|sid_begin|>", "<|sid_end|>"])
    assert infer_layout(with_end, depth=2).sizes == (2, 3)
    assert infer_layout(with_end, depth=3).sizes == (2, 3, 4)
    assert infer_layout(with_end, depth=4).sizes == (2, 3, 4)
    with pytest.raises(LayoutError, match=r"5 levels, but the tokenizer has 3 codebooks: 10:18/2,3,4"):
        infer_layout(with_end, depth=5)
    with pytest.raises(LayoutError, match="4 levels, but the tokenizer has 3 codebooks"):
        infer_layout(make_tokenizer(codebook_tokens((2, 3, 4))), depth=4)


@pytest.mark.parametrize(
    ("added", "reason"),
    [
        ([], "no codebook among its added tokens"),
        (["<|sid_begin|>", "<|sid_end|>"], "no codebook among its added tokens"),
        (["<s_a_0>", "<s_a_2>"], "2 tokens, but not code 1"),
        (["<s_a_0>", "<s_c_0>"], "'b' is missing"),
        (["<a_0>", "<s_a_0>"], "two families of codebooks, 11:11/1 and 10:10/1"),
    ],
)
def test_a_tokenizer_without_whole_codebooks_is_refused(added: list[str], reason: str) -> None:
    with pytest.raises(LayoutError, match=reason) as caught:
        infer_layout(make_tokenizer(added))
    assert "\n" not in str(caught.value)


def test_sid_override_that_agrees() -> None:
    tokenizer = make_tokenizer([*codebook_tokens((2, 3)), "<|sid_begin|>", "<|sid_end|>"])
    inferred = infer_layout(tokenizer)
    for override in ("10:14/2,3", " 10:14/2,3 ", "10:16/2,3,2"):
        layout = infer_layout(tokenizer, override=override)
        assert [book.tolist() for book in layout.codebooks] == [book.tolist() for book in inferred.codebooks]
        assert (layout.begin, layout.end) == (15, 16)


def test_sid_override_picks_one_of_two_families() -> None:
    layout = infer_layout(make_tokenizer(["<a_0>", "<a_1>", "<s_a_0>"]), override="10:11/2")
    assert layout.texts == (("<a_0>", "<a_1>"),)


def test_sid_override_names_codebooks_of_an_unknown_family() -> None:
    tokenizer = make_tokenizer(["item0", "item1", "brand0", "<|sid_end|>"])
    layout = infer_layout(tokenizer, override="10:12/2,1")
    assert [book.tolist() for book in layout.codebooks] == [[10, 11], [12]]
    assert layout.parse("item1brand0<|sid_end|>") == (1, 0)
    assert layout.end == 13


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("10:14/3,2", r"--sid 10:14/3,2 contradicts the tokenizer, whose added tokens say 10:14/2,3"),
        ("11:15/2,3", r"--sid 11:15/2,3 contradicts .* say 10:14/2,3"),
        ("10:15/2,3,1", r"--sid 10:15/2,3,1 contradicts .* say 10:14/2,3"),
        ("10:14/2,2", "are 5, the sizes add up to 4"),
        ("10:14/5,0", "codebook of size 0"),
        ("10-14/5", "expected START:END/SIZE"),
        ("", "expected START:END/SIZE"),
        ("10:10009/10000", "beyond the tokenizer's 17 tokens"),
    ],
)
def test_sid_override_that_contradicts_shows_both(override: str, reason: str) -> None:
    tokenizer = make_tokenizer([*codebook_tokens((2, 3)), "<|sid_begin|>", "<|sid_end|>"])
    with pytest.raises(LayoutError, match=reason) as caught:
        infer_layout(tokenizer, override=override)
    assert "\n" not in str(caught.value)


def test_sid_override_shows_codebooks_that_are_not_contiguous() -> None:
    tokenizer = make_tokenizer(["<s_a_1>", "gap", "<s_a_0>"])
    with pytest.raises(LayoutError, match=r"codebooks of 2 \(<s_a_0>\.\.<s_a_1> = tokens 10 to 12\)"):
        infer_layout(tokenizer, override="10:11/2")


def test_sid_override_must_have_the_catalogs_depth() -> None:
    tokenizer = make_tokenizer(codebook_tokens((2, 3)))
    with pytest.raises(LayoutError, match=r"catalog: 1 levels, but --sid names 2 codebooks: 10:14/2,3"):
        infer_layout(tokenizer, override="10:14/2,3", depth=1)


def test_a_layout_checks_itself() -> None:
    with pytest.raises(LayoutError, match="at least one level"):
        SidLayout((), ())
    with pytest.raises(LayoutError, match="one token id for two codes"):
        SidLayout((np.array([3, 3], np.int32),), (("x", "y"),))
    with pytest.raises(LayoutError, match="2 token ids and 1 texts"):
        SidLayout((np.array([3, 4], np.int32),), (("x",),))
    with pytest.raises(LayoutError, match="the end token 3 lies inside a codebook"):
        SidLayout((np.array([3], np.int32),), (("x",),), end=3)
