"""The hash of the files that run, which is git's own, and its comparison with a commit."""

import os
import subprocess
from pathlib import Path

import pytest

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.machine.source import PROGRAM, copy_source, git_state, source_hash, source_of_commit


def git(root: Path, *arguments: str, text: str = "") -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, input=text).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with all that makes an id: folders, names that sort before them, an executable, a link."""
    monkeypatch.delenv("SOURCE_COMMIT", raising=False)
    for name in PROGRAM:
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / "a.py").write_text(name)
        (tmp_path / name / "inner.py").write_text("b")
        (tmp_path / name / "empty").mkdir()
        (tmp_path / name / "cache" / "__pycache__").mkdir(parents=True)
    (tmp_path / "bench" / "run.sh").write_text("echo")
    (tmp_path / "bench" / "run.sh").chmod(0o755)
    os.symlink("inner.py", tmp_path / "dlrm" / "link.py")
    (tmp_path / "README.md").write_text("read")
    (tmp_path / "pyproject.toml").write_text("[project]")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_the_hash_is_gits_own(checkout: Path) -> None:
    by_git = git(checkout, "mktree", text=git(checkout, "ls-tree", "HEAD", *PROGRAM) + "\n")
    assert source_hash(checkout) == source_of_commit(checkout, "HEAD") == by_git
    (checkout / "kernels" / "inner" / "a.py").write_text("changed")
    assert source_hash(checkout) != by_git
    assert source_of_commit(checkout, "0123abc") is None


def test_a_copy_has_the_same_hash_and_no_caches(checkout: Path) -> None:
    (checkout / "bench" / "cache" / "__pycache__" / "a.pyc").touch()
    copy = checkout / "copy"
    copy_source(checkout, copy)
    assert not list(copy.rglob("__pycache__"))
    assert not (copy / "README.md").exists()
    link = copy / "dlrm" / "link.py"
    assert (link.read_text(), link.is_symlink()) == ("b", False)
    link.unlink()
    link.symlink_to("inner.py")
    assert source_hash(copy) == source_hash(checkout)


def test_state_of_a_checkout(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, source = git(checkout, "rev-parse", "HEAD"), source_hash(checkout)
    (checkout / "untracked").touch()
    assert git_state(checkout) == {"commit": commit, "dirty": False, "source": source}
    (checkout / "README.md").write_text("changed")
    assert git_state(checkout)["dirty"] is False, "no run reads it"
    (checkout / "pyproject.toml").write_text("[changed]")
    assert git_state(checkout)["dirty"] is True
    git(checkout, "checkout", "-q", "pyproject.toml")
    (checkout / "bench" / "new.py").touch()  # which could be imported
    assert git_state(checkout)["dirty"] is True
    (checkout / "bench" / "new.py").unlink()
    monkeypatch.setenv("SOURCE_COMMIT", commit)
    assert git_state(checkout)["dirty"] is False, "the checkout says so"
    (checkout / "bench" / "inner.py").write_text("changed")
    assert git_state(checkout)["dirty"] is True
    monkeypatch.setenv("SOURCE_COMMIT", "0123abc")
    assert git_state(checkout) == {"commit": "0123abc", "dirty": None, "source": source_hash(checkout)}


def test_state_of_a_copy(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stated commit is not believed, and the hash identifies the source."""
    source = source_hash(checkout)
    monkeypatch.setenv("PATH", "")  # no git either
    monkeypatch.setenv("SOURCE_COMMIT", "0123abc")
    assert git_state(checkout) == {"commit": "0123abc", "dirty": None, "source": source}
    (checkout / ".git").rename(checkout / "elsewhere")
    assert git_state(checkout) == {"commit": "0123abc", "dirty": None, "source": source}
    monkeypatch.delenv("SOURCE_COMMIT")
    assert git_state(checkout) == {"commit": None, "dirty": None, "source": source}


def test_this_checkout_hashes_as_git_does() -> None:
    """All kinds of files of the project; as far as nothing is changed here."""
    if not (ROOT / ".git").exists() or git(ROOT, "status", "--porcelain", *PROGRAM):
        pytest.skip("no checkout, or a changed one")
    assert source_hash(ROOT) == source_of_commit(ROOT, "HEAD")
