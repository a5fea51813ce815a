"""Generates the page CAPTURED.md from the code's own lists and reasons.

python -m five_stage.captured_page > CAPTURED.md
"""

import re

import torch

from . import reasons
from .iteration_obstacles import OPTIMIZERS
from .iteration_work import STAGES, UPDATE
from .step_graph import NATIVE


def page() -> str:
    """Returns the page as Markdown."""
    torch_names = [kind.__name__ for kind in NATIVE]
    capturable = [name for name in sorted(vars(torch.optim)) if _has_capturable(name) and name not in torch_names]
    lines = [
        "# What is captured",
        "",
        'Made by `python -m five_stage.captured_page` from what `FiveStageOptions(cuda_graph="iteration")` says.',
        "",
        f"- In the graph, in this order: {', '.join((*STAGES, *UPDATE))}.",
        f"- Fused optimizers of tables: {', '.join(f'`{kind.value}`' for kind in OPTIMIZERS)}.",
        f"- Optimizers of dense weights: {', '.join(f'`{name}`' for name in (*torch_names, *capturable))}.",
        "",
        "What keeps something out says so, with the names of the model in the place of those in italics:",
    ]
    for section in reasons.SECTIONS:
        lines += ["", f"## {section.title}", "", section.then, ""]
        lines += ["- " + re.sub(r"{(\w+)}", r"*\1*", reason.text) for reason in section.reasons]
    return "\n".join(lines) + "\n"


def _has_capturable(name: str) -> bool:
    kind = getattr(torch.optim, name)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
        return False
    return "capturable" in kind.__init__.__annotations__


if __name__ == "__main__":
    print(page(), end="")
