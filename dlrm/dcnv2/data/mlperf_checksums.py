"""MD5 sums of MLPerf's files, by name, from the reference's lists for md5sum -c.

mlcommons/training, recommendation_v2/torchrec_dlrm: md5sums_preprocessed_criteo_click_logs_dataset.txt (dense, labels
and 1-hot ids) and md5sums_MLPerf_v2_synthetic_multi_hot_sparse_dataset.txt.
"""

_KINDS = ("dense.npy", "labels.npy", "sparse.npy", "sparse_multi_hot.npz")

# One row per day: dense features, labels, 1-hot and multi-hot ids.
# fmt: off
_SUMS = (
    ("427113b0c4d85a8fceaf793457302067", "4db255ce4388893e7aa1dcf157077975",
     "8b444e74159dbede896e2f3b5ed31ac0", "9287c283b01087427df915257300bf36"),
    ("3afc11c56062d8bbea4df300b5a42966", "fb40746738a7c6f4ee021033bdd518c5",
     "61e95a487c955b515155b31611444f32", "f4fedd921a4b214b03d0dfcd31cc30e6"),
    ("4e73d5bb330c43826665bec142c6b407", "f0adfec8191781e3f201d45f923e6ea1",
     "0473d30872cd6e582c5da0272a0569f8", "2a15bdd8d25781c4cdcf5d791dfd19f9"),
    ("df1f3395e0da4a06aa23b2e069ff3ad9", "69caadf4d219f18b83f3591fe76f17c7",
     "d6b0d02ff18da470b7ee17f97d5380e0", "0341aaee2f661f9e939a39d7a6be0aea"),
    ("27868a93adc66c47d4246acbad8bb689", "c4a6a16342f0770d67d689c6c173c681",
     "ca54008489cb84becc3f37e7b29035c7", "e8db54dbf5fe438ecb76fcc2d520f31a"),
    ("e9bc6de06d09b1feebf857d9786ee15c", "9e3e17f345474cfbde5d62b543e07d6b",
     "d1374ee84f80ea147957f8af0e12ebe4", "fd35a7a2bc0ba63935b4b1c742eca018"),
    ("09c8bf0fd4798172e0369134ddc7204a", "945cef1132ceab8b23f4d0e269522be2",
     "e4df1c271e1edd72ee4658a39cca2888", "7d5c72b6bbe8be1dfa1f69db5c7e64fd"),
    ("ae718f0d6d29a8b605ae5d12fad3ffcc", "5ff5e7eef5b88b80ef03d06fc7e81bcf",
     "cbcb7501a6b74a45dd5c028c13a4afbc", "59bcb9855243d3a5c0ae56daa18e1033"),
    ("5a589746fd15819afbc70e2503f94b35", "43871397750dfdc69cadcbee7e95f2bd",
     "c1fb4369c7da27d23f4c7f97c8893250", "b9f7fbccae6bb9fdabf30259b5e305f0"),
    ("4bb86eecb92eb4e3368085c2b1bab131", "f851934555147d436131230ebbdd5609",
     "e4ac0fb8a030f0769541f88142c9f931", "03da5bf484870a3c77f66befc680ad04"),
    ("7fc29f50da6c60185381ca4ad1cb2059", "e3b3f6f974c4820064db0046bbf954c8",
     "1018a9ab88c4a7369325c9d6df73b411", "eb048fc4fbd7ffa7932b81a523fe5a39"),
    ("df822ae73cbaa016bf7d371d87313b56", "26219e9c89c6ce831e7da273da666df1",
     "f1596fc0337443a6672a864cd541fb05", "a2ebee45c9836c8c8598610a6a3e9d60"),
    ("015968b4d9940ec9e28cc34788013d6e", "f0ca7ce0ab6033cdd355df94d11c7ed7",
     "03a2ebd22b01cc18b6e338de77b4103f", "0dd59855e1a7b65c42f7e7af303c610e"),
    ("9d79239a9e976e4dd9b8839c7cbe1eba", "4b099b9200bbb490afc08b5cd63daa0e",
     "2b507e0f97d972ea6ada9b3af64de151", "7510698f3fcff9f3d7ef9dd478e637aa"),
    ("9242e6c974603ec235f163f72fdbc766", "80cae15e032ffb9eff292738ba4d0dce",
     "3dccc979f7c71fae45a10c98ba6c9cb7", "562978b7b93e179f1adb9b9f5e1dc338"),
    ("64c6c0fcd0940f7e0d7001aa945ec8f8", "a6a730d1ef55368f3f0b21d32b039662",
     "c852516852cc404cb40d4de8626d2ca1", "042967232f016fbccf0d40d72d0b48bb"),
    ("5c75b60e63e9cf98dec13fbb64839c10", "5a71a29d8df1e8baf6bf28353f1588d4",
     "6c838050751697a91bbf3e68ffd4a696", "7b59170fb0e2d1e78f15cb60cea22723"),
    ("9798bccb5a67c5eac834153ea8bbe110", "0a814b7eb83f375dd5a555ade6908356",
     "40d2bc23fbcccb3ddb1390cc5e694cf0", "5054c54515d2574cda0f11646787df44"),
    ("cda094dfe7f5711877a6486f9863cd4b", "a4fa26ada0d4c312b7e3354de0f5ee30",
     "51711de9194737813a74bfb25c0f5d30", "28d3dbf6c70e68f01df12a4c3298f754"),
    ("0f0b2c0ed279462cdcc6f79252fd3395", "b21ad457474b01bd3f95fc46b6b9f04b",
     "dd4b72cd704981441d17687f526e42ae", "db7554263a1754d3e29341d0f03bc2f0"),
    ("95ffc084f6cafe382afe72cbcae186bc", "9555e572e8bee22d71db8c2ac121ea8a",
     "bc9a8c79c93ea39f32230459b4c4572a", "91ee92ffb4810c26e157c1335ef4de06"),
    ("4680683973be5b1a890c9314cfb2e93b", "672edc866e7ff1928d15338a99e5f336",
     "e4a8ae42a6d46893da6edb73e7d8a3f7", "2c99fad7b146b0ba581dce34f640f44e"),
    ("3d56f190639398da2bfdc33f87cd34f0", "733da710c5981cb67d041aa1039e4e6b",
     "42ef88d6bb2550a88711fed6fc144846", "c7ba52c5aaf24d76acca22a0cb13b737"),
    ("cdf7af87cbc7e9b468c0be46b1767601", "dd68f93301812026ed6f58dfb0757fa7",
     "0c33f1562529cc3bca7f3708e2be63c9", "c46b7e31ec6f2f8768fa60bdfc0f6e40"),
)
# fmt: on

MLPERF_MD5 = {
    f"day_{day}_{kind}": md5 for day, sums in enumerate(_SUMS) for kind, md5 in zip(_KINDS, sums, strict=True)
}
"""The MD5 sum of each file, in hexadecimal."""
