"""Artists and albums of items."""

import numpy as np
import polars as pl
import pytest

from dlrm_bench.dlrm.dlrmv4.data.item_maps import FOLDER, ItemMaps, map_path, write_maps
from dlrm_bench.dlrm.dlrmv4.data.limits import Rows


def test_the_last_row_of_an_item_wins_and_missing_items_have_none(root, maps):
    pairs = pl.read_parquet(map_path(root, "artist"))
    assert len(maps) == 60
    expected = [0] * 60
    for artist, item in pairs.rows():
        expected[item] = artist
    assert maps.artist.tolist() == expected
    assert pairs["item_id"].is_duplicated().any()
    assert maps.album[2] == 0


def test_written_maps_are_read_back(tmp_path):
    artist = np.array([0, 5, 0, 7, 0], dtype=np.int32)
    album = np.zeros(5, dtype=np.int32)
    write_maps(tmp_path, artist, album)
    maps = ItemMaps.open(tmp_path)
    assert maps.artist.tolist() == artist.tolist()
    assert maps.album.tolist() == album.tolist()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"artist_id": [1, None], "item_id": [1, 2]}, "without an id"),
        ({"artist_id": [1], "item_id": [-1]}, "negative item"),
        ({"artist_id": [1_293_395], "item_id": [1]}, r"outside of table artist_id.* \(--model\.event-rows\)"),
        ({"artist_id": [1], "item_id": [9_390_624]}, r"table item_id has .* \(--model\.event-rows\)"),
        ({"artist": [1], "item_id": [1]}, "cannot be read"),
    ],
)
def test_bad_maps_are_named(tmp_path, columns, message):
    write_maps(tmp_path, np.ones(3, dtype=np.int32), np.ones(3, dtype=np.int32))
    pl.DataFrame(columns).write_parquet(map_path(tmp_path, "artist"))
    with pytest.raises(ValueError, match=message):
        ItemMaps.open(tmp_path)
    (tmp_path / FOLDER / "artist_item_mapping.parquet").unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        ItemMaps.open(tmp_path)


def test_rows_are_checked():
    assert Rows().crosses[-1] == 40_000_000
    with pytest.raises(ValueError, match="rows of artist"):
        Rows(artist=0)
