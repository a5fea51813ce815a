"""Docstrings and comments name only what exists: files, names in backticks, and references."""

import ast
import builtins
import io
import keyword
import re
import subprocess
import sys
import tokenize
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_floors import FILES, FLOORS, ROOT

# The user chooses the word after --out.
_FILE = re.compile(r"(?<!--out )(?<![\w/.*<>{}])\w[\w./-]*\.(?:py|md|cuh?|html|json|npz|sbatch|sh|toml)\b(?![\w(*])")
_BACKTICKS = re.compile(r"`([^`\n]+)`")
_LOOKS_LIKE_A_NAME = r"[A-Za-z]\w*(?:_\w+|(?:\.\w+)+|[a-z][A-Z]\w*)"
_SEE = re.compile(rf"\b[Ss]ee (?:the )?({_LOOKS_LIKE_A_NAME})")
_WORD = re.compile(r"[A-Za-z_]\w*(?:-[A-Za-z]\w*)*")
_COMMENT = re.compile(r"//(.*)")  # of CUDA C++
_NEITHER_VERB_NOR_NOUN = re.compile(
    r"(What|Where|When|Which|Who|Why|How|If|As|At|By|For|From|In|Of|On|To|With|Within|Without|Between|Beside|Before|After)\b"
)

LANGUAGE = {*keyword.kwlist, *dir(builtins), *sys.stdlib_module_names, "__global__"}
OTHERS_FILES = {
    "TorchRec": ("comm_ops.py", "dist_data.py", "embedding_sharding.py", "jagged_tensor.py"),
    "MLPerf's reference of DLRM-DCNv2": (
        "materialize_synthetic_multihot_dataset.py",
        "recommendation_v2/torchrec_dlrm/dlrm_main.py",
        "recommendation_v2/torchrec_dlrm/multi_hot.py",
        "scripts/materialize_synthetic_multihot_dataset.py",
        "scripts/process_Criteo_1TB_Click_Logs_dataset.sh",
    ),
    "MLPerf's reference of DLRMv4": (
        "dlrm_v4/configs.py",
        "generative_recommenders/dlrm_v4/configs.py",
        "generative_recommenders/dlrm_v4/datasets/yambda.py",
        "modules/dlrm_hstu.py",
        "modules/postprocessors.py",
        "modules/stu.py",
        "ops/position.py",
        "ops/pytorch/pt_position.py",
        "ops/triton/triton_position.py",
        "train/utils.py",
    ),
    "MLPerf's checks": ("rcps_dlrmv4.json",),
    "xxHash": ("doc/xxhash_spec.md",),
    "Criteo's days": ("day_i_sparse_multi_hot.npz",),  # i stands for a number
}


class Text(NamedTuple):
    """A docstring or comment, and where it begins; path from the root on."""

    path: Path
    line: int
    text: str


def texts(path: Path, source: str) -> Iterator[Text]:
    """Yields the docstrings, those of attributes too, and the comments of a file of Python or CUDA C++."""
    if path.suffix != ".py":
        for line, code in enumerate(source.splitlines(), start=1):
            yield from (Text(path, line, comment) for comment in _COMMENT.findall(code))
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Text(path, node.lineno, node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(path, token.start[0], token.string)


def names_of(path: Path, source: str) -> set[str]:
    """Returns each name in the code of a file, and those in its strings of one word, such as keys and flags."""
    if path.suffix != ".py":
        return set(re.findall(r"\w+", _COMMENT.sub("", source)))
    names: set[str] = set()
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg | ast.keyword):
            names.add(str(node.arg))
        elif isinstance(node, ast.alias):
            names |= {*node.name.split("."), node.asname or node.name}
        elif isinstance(node, ast.ImportFrom):
            names.update((node.module or "").split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words = node.value.split()
            names.update(_spelled(word) for word in (_WORD.findall(words[0]) if len(words) == 1 else ()))
    return names


def files_named_in(source: str) -> set[str]:
    """Returns the names, without folders, of the files in the strings of a file of Python, which it reads or writes."""
    strings = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    named = [_FILE.findall(text) for text in strings if isinstance(text, str) and "\n" not in text]
    return {name.split("/")[-1] for names in named for name in names}


def unknown(text: Text, names: Collection[str], files: Collection[str]) -> Iterator[str]:
    """Yields each name in a docstring or comment that there is not.

    names: of the code. files: paths from the root on, which a text may shorten by the folders that it lies in itself,
    and names without folders, which may stand for a file in any. Words in capitals stand for something in a path.
    """
    for name in _FILE.findall(text.text):
        last = name.split("/")[-1]
        there = last in files or any(str(folder / name) in files for folder in text.path.parents)
        if not there and not last.partition(".")[0].isupper():
            yield name
    for quoted in _BACKTICKS.findall(text.text):
        # Of commands and sentences only what must be a name.
        pattern = rf"\b{_LOOKS_LIKE_A_NAME}|(?<!\w)--[a-z][\w-]+" if " " in quoted else r".+"
        for name in re.findall(pattern, _FILE.sub("", quoted)):
            yield from _unknown_words(name, names)
    for name in _SEE.findall(_BACKTICKS.sub("", text.text)):
        if not _FILE.match(name):
            yield from _unknown_words(name, names)


def _unknown_words(quoted: str, names: Collection[str]) -> Iterator[str]:
    for word in _WORD.findall(re.sub(r"\d+(?:\.\d+)?e-?\d+", "", quoted)):
        name = _spelled(word)
        if len(name) > 1 and not {name, name.removeprefix("no_")} & set(names):
            yield word


def _spelled(word: str) -> str:
    """A flag as the code names it."""
    return word.replace("-", "_")


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a checkout: git does not know its files")
    return done.stdout.splitlines()


@cache
def read_sources() -> dict[Path, str]:
    """Returns the text of each file of code, by its path from the root on."""
    sources = [*FILES, *(ROOT / "examples").glob("*.py")]
    sources += [path for floor in FLOORS for kind in ("*.cu", "*.cuh") for path in (ROOT / floor).rglob(kind)]
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in sorted(sources)}


@cache
def every_text() -> tuple[Text, ...]:
    """Returns every docstring and comment."""
    return tuple(text for path, source in read_sources().items() for text in texts(path, source))


def test_docstrings_and_comments_name_what_there_is():
    read = read_sources()
    paths = tracked()
    names = {word for path in paths if not path.startswith("results/") for word in re.findall(r"\w+", path)}
    names |= LANGUAGE.union(*(names_of(path, source) for path, source in read.items()))
    files = {*paths, *(name for theirs in OTHERS_FILES.values() for name in theirs)}
    files = files.union(*(files_named_in(source) for path, source in read.items() if path.suffix == ".py"))
    assert len(every_text()) > 3000
    found = [f"{text.path}:{text.line} {name}" for text in every_text() for name in unknown(text, names, files)]
    assert found == []


def test_docstrings_begin_with_a_verb_or_a_noun():
    """Or, of a truth value, with "Whether"; so that the first words say what is returned or held."""
    wrong = [text for text in every_text() if _NEITHER_VERB_NOR_NOUN.match(text.text)]
    assert [f"{text.path}:{text.line} {text.text[:40]!r}" for text in wrong] == []


def test_others_files_are_named_somewhere():
    """An exception that nothing needs any more goes."""
    everything = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    assert [name for theirs in OTHERS_FILES.values() for name in theirs if name not in everything] == []


@pytest.mark.parametrize(
    ("said", "missing"),
    [
        ("Rooms of a batch (capacity.py)", ["capacity.py"]),
        ("as output_dist does, see trimmed_output_dist", ["trimmed_output_dist"]),
        ("Times of all; see benchmark.py", ["benchmark.py"]),
        ("of the smaller `turn`", ["turn"]),
        ("see `pipeline.nothing`, `--no-overlap` and `a --missing-flag b`", ["missing-flag", "nothing"]),
        ("see dlrm/data/padding.py, padding.py, `run(x)` and `pipeline.run`", []),
        ("`dlrm-bench limits` and `1e-3` of `SYSTEM.json`", []),
    ],
)
def test_the_check_sees(said, missing):
    text = Text(Path("dlrm/data/batch.py"), 1, said)
    files = {"dlrm/data/padding.py", "dlrm/benchmark/benchmark.py"}
    assert sorted(w.lstrip("-") for w in unknown(text, {"run", "pipeline", "x", "overlap"}, files)) == missing


def test_names_are_those_of_code_and_not_of_docstrings():
    source = '"""Uses turn."""\nimport a.b as c\n# comment\ndef f(x: int, *, y=1):\n    return x.z["key"], "no key"\n'
    assert names_of(Path("m.py"), source) == {"a", "b", "c", "f", "x", "y", "z", "int", "key"}
    assert [text.text for text in texts(Path("m.py"), source)] == ["Uses turn.", "# comment"]
