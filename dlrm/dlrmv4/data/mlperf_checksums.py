"""MLPerf's own files of DLRMv4: checksums and counts.

Source: mlcommons/training, recommendation/sha256sums_yambda_5b_cache.txt and md5sums_yambda_5b_processed.txt, of Yambda
at snapshot dd6f3a19eef5866e346c3270e098baa641a44948; samples of training and evaluation are those that mlperf-logging's
rules for dlrmv4 of round 6.1 ask for.
"""

EVENTS = 4_763_272_693
TRAIN_SAMPLES, EVAL_SAMPLES = 2_290_835_423, 2_058_204
WINDOWS = 300

CACHE = "processed_5b/hstu_cache_L4086"
SHA256 = {
    "_READY": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "anchor_ts_L4086.npy": "42247ad5f10013bf1fe414175c76e08de0e6239144b9416ed0cf4f7b67f9df80",
    "flat_event_types.npy": "0f8781f498d8aa5df103ea45075c8b55df02338c514ff02e3ae17130caa6db3c",
    "flat_is_like.npy": "65be7d0af07c30b639d731c9c09c4af4e64dcad964872e65c42dcf6882e7c705",
    "flat_is_listen_plus.npy": "08a4ad3222205e27c029677f5d475166550093507a0f88063ce79a9b1c54376d",
    "flat_is_organic.npy": "43d46dddfc1c1ead520b694afc9f6542da8eb52e93559cdeb54bb1f494777d47",
    "flat_is_skip.npy": "bc4f8fe47ef4c12ffd7cd2e4977f8ad045b5cbec879610ecb1fbe637a8450d35",
    "flat_item_ids.npy": "7ae0f3e5740c932b2ea074c4b5aaed30156088a9231d392f875f13facd59ddc8",
    "flat_played_ratio.npy": "cbb46a73876588dce07d35fe0aa9556c3e203a5b63e6aadf0871dc5f38dad4f4",
    "flat_timestamps.npy": "6d889e2aedb8f80393ba9bb8d99300984d8b3e749e8ec0e81f633988326b34de",
    "flat_uid.npy": "ae1488572ad46e1252ace1b7b0ec9a358b5bbf9e4f0d8e10a577d3bd4289fa7a",
    "positions_L4086.npy": "3e8e3a7ecf68b4b4d69de985e6004e3afdbff19008d3dd8d1d992443d5aa365b",
    "store_meta.json": "dab13cf71beb3c57e29e3eff68c38f3db69eb79533ede9a9eb727bfdce3eefa3",
    "unique_uids.npy": "aa3f4073761b68a4f240371f3af14947830d4484e0753249ce844eeeeff9436b",
    "user_end.npy": "d23230058991edfbfe4caeeceacecf7506f47b1e7fb8254f9c6bb1f588a6776a",
    "user_start.npy": "0aa433a9dcda2868f9f765f5561ea1041c7340f323e0f84949b2e8ac963e8764",
}
"""Files of the cache; its build is deterministic, so these hold for any host's."""

MD5 = {
    "processed_5b/item_popularity.npy": "6a586fcf43109e34837f68d73213c01d",
    "shared_metadata/artist_item_mapping.parquet": "a7fa1226d16d2867eb7ca43f395091d0",
    "shared_metadata/album_item_mapping.parquet": "40a37753824093fa6d5c89a50c7c5191",
}
"""Files of the folder of data, as downloaded: a parquet file of the same rows may have other bytes."""
