"""Data and models of the zoo; see benchmark.Parts."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.data.dataset import Dataset, FileContent
from dlrm_bench.dlrm.dense.guarded_adam import GuardedAdam
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.torchrec_model import DeclaredSizes, TorchRecModel
from dlrm_bench.dlrm.zoo import random_dataset
from dlrm_bench.dlrm.zoo.config import BagsModel, RandomData, SequenceData, ZooOptimizer
from dlrm_bench.dlrm.zoo.models import build
from dlrm_bench.dlrm.zoo.random_dataset import Drawn, RandomDataset, capacity, draw_samples, pads, spare_sequences

ADAM_STATES = {"step": ".step", "exp_avg": ".exp_avg", "exp_avg_sq": ".exp_avg_sq"}
"""Adam's states, with the suffix of their keys, appended to the weight's key."""


def adam(config: ZooOptimizer) -> Callable[[list[nn.Parameter], Callable[[], Tensor]], GuardedAdam]:
    """Returns a factory of the dense optimizer; see torchrec_model.MakesOptimizer."""

    def make(parameters: list[nn.Parameter], skip: Callable[[], Tensor]) -> GuardedAdam:
        return GuardedAdam(parameters, skip(), lr=config.dense_learning_rate, betas=(0.9, 0.999), eps=config.eps)

    return make


def fresh(drawn: Drawn) -> object:
    """Returns the batch for one iteration, without cached values; it may be used again later."""
    return drawn.batch.untouched()


def open_data(config: TrainingConfig) -> Dataset:
    """Returns batches drawn at random."""
    model, data = _model(config), config.data
    assert isinstance(data, RandomData)
    return RandomDataset(partial(draw_samples, model, data, config.seed), data.random_batches)


def data_content(config: TrainingConfig) -> dict[str, FileContent]:
    """Returns nothing: there are no files."""
    return {}


def batch_bytes(config: TrainingConfig) -> int:
    """Returns the bytes of a rank's batch in host memory, with the longest histories."""
    model, size = _model(config), config.local_batch_size
    bags = len(model.bag_names) * (8 * model.multi_hot_size + 4)
    history = 8 * model.longest_history + 4 if model.longest_history else 0
    spare = 4 * spare_sequences(model, size) if pads(config.data) else 0
    return size * (4 * model.dense_in_features + 4 + bags + history) + spare


def empty_batch(config: TrainingConfig, pin: bool) -> Drawn:
    """Returns a batch of zeros. pin: page-locked."""
    batch = random_dataset.zeros(_model(config), config.data, config.local_batch_size)
    return Drawn(batch.pin_memory() if pin else batch, config.local_batch_size)


def torchrec_model(config: TrainingConfig, ranks: Ranks) -> TorchRecModel:
    """Returns the model for the pipelines over TorchRec's modules."""
    model, optimizer, data = _model(config), config.optimizer, config.data
    assert isinstance(optimizer, ZooOptimizer)
    module = build(model, config.seed)
    full = isinstance(data, SequenceData) and data.full
    return TorchRecModel(
        module=module,
        batch=fresh,
        zeros=partial(empty_batch, config, ranks.device.type == "cuda"),
        dense_optimizer=adam(optimizer),
        dense_states=ADAM_STATES,
        sizes=DeclaredSizes(
            bags=dict.fromkeys(model.bag_names, model.multi_hot_size),
            sequences={"history": model.longest_history} if full else {},
            batches=({"history": capacity(model, config.local_batch_size)},) if pads(data) else (),
        ),
        compiled=module.compiled(),
    )


def _model(config: TrainingConfig) -> BagsModel:
    assert isinstance(config.model, BagsModel)
    return config.model
