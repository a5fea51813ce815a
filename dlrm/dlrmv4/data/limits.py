"""Limits of DLRMv4's histories and windows, and the rows of the tables that samples point into."""

from dataclasses import asdict, dataclass, fields

POOLS = 3
"""Pools of a history: listen+, like, skip."""
CONTEXT = 8
"""Tokens of context: the user, and seven crosses."""
LISTEN, LIKE = 0, 1
"""Event types of the cache; dislike is 2, unlike 3, undislike 4."""
LISTEN_PLUS, LIKED, SKIPPED = 1, 2, 4
"""Action bits: a listen of at least 50 % of the track, a like, any other listen."""
LISTEN_PLUS_PERCENT = 50


@dataclass(kw_only=True, slots=True, frozen=True)
class Limits:
    """The requirements on an anchor and the content of its history; the defaults are the benchmark's
    (gin/yambda_5b.gin)."""

    history: int = 4086
    """Events of the longest history: a third of it of each pool."""
    min_history: int = 4086
    """Earlier events of its user that make a listen an anchor."""
    scan: int = 20_000
    """Events before an anchor among which its history is looked for."""
    window_seconds: int = 86_400
    """Length of a window of training."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "min_history" else 1
            if value < least:
                raise ValueError(f"limits: {field.name} is {value}: choose {least} or more")

    @classmethod
    def scaled(cls, history: int) -> "Limits":
        """Returns the benchmark's limits, or smaller ones in proportion to the longest history."""
        whole = cls()
        return cls(history=history, min_history=history, scan=-(-whole.scan * history // whole.history))

    @property
    def pool(self) -> int:
        """Largest number of events of one pool in a history."""
        return max(1, self.history // POOLS)

    @property
    def anchors_name(self) -> str:
        """The end of the names of the files of anchors, as the reference names them."""
        return f"L{self.history}" + (f"_m{self.min_history}" if self.min_history != self.history else "")

    @property
    def cache_name(self) -> str:
        """The cache's folder, as the reference names it."""
        return f"hstu_cache_L{self.history}"

    def as_dict(self) -> dict[str, int]:
        """Every limit by name, for store_meta.json."""
        return asdict(self)


@dataclass(slots=True, frozen=True)
class Rows:
    """Rows of each table: of events, then of context; the defaults are the benchmark's (dlrm_v4/configs.py).

    Ids of items, artists, albums and users are rows. Rows of the seven crosses are hashes (crosses.py).
    """

    item: int = 9_390_624
    artist: int = 1_293_395
    album: int = 3_367_692
    uid: int = 1_000_001
    user_x_artist: int = 100_000_000
    user_x_album: int = 40_000_000
    user_x_hour: int = 24_000_000
    item_x_hour: int = 40_000_000
    artist_x_hour: int = 32_000_000
    user_x_is_organic: int = 2_000_000
    user_x_artist_x_hour: int = 40_000_000

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < getattr(self, field.name) <= 1 << 31:
                raise ValueError(f"rows of {field.name}: {getattr(self, field.name)} is not in 1 ... 2^31")

    @property
    def crosses(self) -> tuple[int, ...]:
        """Rows of the seven crosses, in the order of Samples.context."""
        return tuple(getattr(self, field.name) for field in fields(self)[4:])
