"""The README.md that stands beside a trained checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLUMNS = ("HR@1", "HR@5", "HR@10", "HR@50", "NDCG@10")


def write_card(report: dict[str, Any], command: str, out: Path) -> None:
    """Write ``out/README.md`` from what ``training.json`` holds; ``command`` makes the checkpoint again."""
    sections = [_head(report, command), _quality(report), _margins(report), _files(report)]
    (out / "README.md").write_text("\n\n".join(filter(None, sections)) + "\n", encoding="utf-8")


def _head(report: dict[str, Any], command: str) -> str:
    model, training = report["settings"]["model"], report["training"]
    return (
        f"# A Qwen3 of {report['parameters']:,} parameters\n\n"
        f"{model['num_hidden_layers']} layers, hidden size {model['hidden_size']}, "
        f"{model['num_attention_heads']} query and {model['num_key_value_heads']} KV heads of "
        f"{model['head_dim']}, tied embeddings, stored in bf16. Codebooks: "
        f"{', '.join(map(str, report['codebooks']))}.\n\n"
        f"Trained on {training['sequences']:,} sequences with {training['items']:,} items in "
        f"{training['seconds']:,.0f} s ({training['device']}, {training['date']}), seed {report['seed']}. "
        f"Made again by\n\n    {command}"
    )


def _quality(report: dict[str, Any]) -> str:
    if "quality" not in report:
        return ""
    lines = [
        f"On {report['held_out']:,} held-out rows, trie on, 50 beams, score space `sid`, float32; baselines on the "
        "same training sequences:\n",
        "| | " + " | ".join(COLUMNS) + " |",
        "|---|" + "--:|" * len(COLUMNS),
    ]
    for name, figures in report["quality"].items():
        lines.append(f"| {name} | " + " | ".join(f"{figures[column]:.4f}" for column in COLUMNS) + " |")
    if "optimum" in report:
        found = report["optimum"]
        lines.append(
            f"\nThe generator itself, knowing everything but the hidden state, reaches HR@10 {found['HR@10']:.4f} on "
            f"these rows ({found['HR@10 expected']:.4f} expected)."
        )
    return "\n".join(lines)


def _margins(report: dict[str, Any]) -> str:
    if "margins" not in report:
        return ""
    lines = [
        "Gaps between the scores (log-probability over length) of neighbouring ranks, float64, 64 beams:\n",
        "| score space | prompts | median gap | below 1e-4 |",
        "|---|--:|--:|--:|",
    ]
    lines += [
        f"| {m['space']} | {m['prompts']} | {m['median_gap']:.4f} | {100 * m['small_share']:.2f} % |"
        for m in report["margins"]
    ]
    return "\n".join(lines)


def _files(report: dict[str, Any]) -> str:
    lines = [
        "`catalog.json`: semantic ID to items. `items.tsv`: item, semantic ID, title. "
        "`training.json`: settings and all figures."
    ]
    if "quality" in report:
        lines.append("`test.csv`: user, history (oldest first), next item; nothing of it was trained on.")
    return " ".join(lines)
