"""The page of what is captured is what the code says today."""

from pathlib import Path

from dlrm_bench.pipeline.five_stage import captured_page


def test_the_page_is_as_the_code_makes_it() -> None:
    path = Path(captured_page.__file__).with_name("CAPTURED.md")
    made = "`python -m dlrm_bench.pipeline.five_stage.captured_page > pipeline/five_stage/CAPTURED.md`"
    assert path.read_text() == captured_page.page(), f"make it anew: {made}"
