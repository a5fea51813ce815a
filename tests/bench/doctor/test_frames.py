from dlrm_bench.bench import ROOT
from dlrm_bench.bench.doctor.frames import Frames, short_path
from tests.bench.doctor.made import CALLER, DIST, LIBRARIES, PACKAGES, TORCH, USER, frame

FRAMES = Frames(LIBRARIES)


def test_the_users_line_is_the_nearest_one_of_the_script():
    inner = frame("/home/me/model.py", 3)
    assert FRAMES.user([TORCH, inner, DIST, USER]) == inner
    assert FRAMES.library([TORCH, inner, DIST, USER]) == [TORCH]


def test_torch_itself_is_named_only_where_no_other_library_is():
    assert FRAMES.library([TORCH, DIST, CALLER, TORCH, USER]) == [DIST, CALLER]
    assert FRAMES.library([TORCH, USER]) == [TORCH]
    assert FRAMES.library([USER]) == []


def test_python_and_this_project_are_libraries():
    assert FRAMES.is_library(frame("/env/lib/python3.12/threading.py", 1))
    assert FRAMES.is_library(frame("<frozen runpy>", 1))
    assert FRAMES.is_library(frame(str(ROOT / "pipeline" / "five_stage" / "pipeline.py"), 1))
    assert not FRAMES.is_library(frame(str(ROOT / "train.py"), 1))


def test_without_a_line_of_the_users_the_outermost_one_stands_for_it():
    assert FRAMES.user([DIST, CALLER]) == CALLER
    assert FRAMES.library([DIST, CALLER]) == [DIST]


def test_paths_are_shown_from_the_package_or_the_working_directory_on(tmp_path, monkeypatch):
    assert short_path(f"{PACKAGES}/torchrec/a.py", LIBRARIES) == "torchrec/a.py"
    assert short_path("/env/lib/python3.12/queue.py", LIBRARIES) == "queue.py"
    monkeypatch.chdir(tmp_path)
    assert short_path(str(tmp_path / "src" / "train.py")) == "src/train.py"
    assert short_path("/home/me/train.py") == "/home/me/train.py"
