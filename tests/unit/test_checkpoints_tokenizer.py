"""The tokenizer of made checkpoints: layout, template, round trips."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flashrec.sid import infer_layout
from flashrec_harness.checkpoints.tokenizer import build_tokenizer, save_tokenizer, sid_text
from flashrec_harness.prompts import INSTRUCTION, TEMPLATE_TEXTS

SIZES = (3, 4, 2)
TOKENIZER = build_tokenizer(["Alder Kettle, Black", "Birchway Tent 2"] * 3 + [*TEMPLATE_TEXTS] * 5, SIZES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    out: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(TOKENIZER, out, max_length=99)
    return AutoTokenizer.from_pretrained(out)


def test_the_layout_is_inferred(saved: PreTrainedTokenizerFast) -> None:
    layout = infer_layout(saved)
    assert layout.sizes == SIZES
    assert layout.begin_text == "<|sid_begin|>"
    assert layout.end_text == "<|sid_end|>"
    assert saved("<|sid_begin|><s_a_2><s_b_3><s_c_1><|sid_end|>")["input_ids"] == [
        layout.begin,
        *layout.token_ids((2, 3, 1)),
        layout.end,
    ]
    assert sid_text((2, 3, 1)) == "<|sid_begin|><s_a_2><s_b_3><s_c_1><|sid_end|>"


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_semantic_ids_survive_skipping_special_tokens(saved: PreTrainedTokenizerFast) -> None:
    ids = saved("<|im_start|>assistant\n" + sid_text((0, 1, 1)) + "<|im_end|>")["input_ids"]
    assert saved.decode(ids, skip_special_tokens=True) == "assistant\n" + sid_text((0, 1, 1))


def test_the_chat_template_is_chatml(saved: PreTrainedTokenizerFast) -> None:
    text = saved.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_instruction_takes_few_tokens() -> None:
    assert len(TOKENIZER.encode(INSTRUCTION).ids) < len(INSTRUCTION) / 3


def test_codebooks_can_start_where_asked() -> None:
    placed = build_tokenizer(TEMPLATE_TEXTS, SIZES, text_tokens=1000)
    assert placed.token_to_id("<s_a_0>") == 1000
    assert placed.get_vocab_size() == 1000 + sum(SIZES) + 2
    assert placed.decode(placed.encode(INSTRUCTION).ids) == INSTRUCTION
    assert "<|unused_5|>" in placed.get_vocab()
    assert "<|unused_5|>" not in placed.encode("<|unused_5|>").tokens, "no text encodes to a filler"


def test_the_corpus_decides() -> None:
    corpus = ["a b c abc", "abcabc", "cab bac"] * 4
    assert build_tokenizer(corpus, SIZES).to_str() == build_tokenizer(corpus, SIZES).to_str()
