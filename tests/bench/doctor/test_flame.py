from dlrm_bench.bench.doctor.flame import svg, tree_of
from tests.bench.doctor.made import PACKAGES, USER, frame, rank_file, sampled


def test_boxes_are_as_wide_as_their_time():
    rank = rank_file([], [])
    top = frame("/home/me/train.py", 90, "<module>", "main()")
    layer = frame(f"{PACKAGES}/torch/nn/modules/linear.py", 9, "Linear.forward")
    stacks = [[layer, USER, top], [frame("/home/me/train.py", 41, "main", "read(<x>)"), top]]
    samples = [
        (1000.0 * i + at, number, us, us) for i in range(50) for at, number, us in ((1, 0, 750.0), (2, 1, 250.0))
    ]
    rank["sampled"] = sampled(stacks, samples)
    root = tree_of(rank)
    assert [round(box.ms / root.ms, 6) for box in root.inner.values()] == [0.75, 0.25]  # <module> holds all: left out
    picture = svg(root)
    assert "Linear.forward (torch/nn/modules/linear.py)" in picture
    assert "read(&lt;x&gt;)" in picture
    assert 'width="779.5"' in picture
    assert "http" not in picture


def test_no_samples_no_picture():
    assert svg(tree_of(rank_file([], []))) == ""
