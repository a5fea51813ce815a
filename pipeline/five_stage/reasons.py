"""Reasons why something is not in the graph of an iteration, each stated once, for the code that gives it and for the
page of all of them (`python -m five_stage.captured_page`)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    """A sentence with names in braces."""

    text: str

    def __call__(self, **names: object) -> str:
        """Returns the sentence with the names of this model."""
        return self.text.format(**names)


# Modules, inputs and tables: an error, or with "iteration-or-dense" a graph of the dense part

NOT_TRIMMED = Reason(
    "{module} is a {kind}, whose input dist reads the device: shard an EmbeddingBagCollection by "
    "TrimmedEBCSharder(multi_hot_sizes), with feature processors by "
    "FeatureProcessedEmbeddingBagCollectionSharder(TrimmedEBCSharder(multi_hot_sizes)), an EmbeddingCollection by "
    "TrimmedECSharder(sequence_lengths)"
)
PROCESSED_ROWS = Reason(
    "{module} has feature processors and tables split by rows, of whose ids a graph looks up padding too, with weights "
    "that processors replace: plan its tables table-wise, column-wise or data-parallel"
)
PROCESSOR_HOOKS = Reason("hooks of the feature processors of {module} would run at captures only: remove them")
READ_PAST = Reason(
    "feature processors read their {parameter} past the module that it is a parameter of, and past that module's "
    "dicts: read it as an attribute"
)
READS_SIZES = Reason(
    "the input dist of {features} of {module} depends on the ids: declare the sizes of all features to the sharder, "
    "plan tables table-wise, column-wise or data-parallel, or give those of bags that are split by rows a row_capacity"
)
VALIDATES = Reason(
    "{module} looks at every length of every batch, which reads the device: leave out TrimmedEBCSharder's validate=True"
)
GIVES_IDS = Reason("{module} gives ids with its vectors (need_indices): give the model what it needs of them")
VARIABLE_BATCH = Reason("batch sizes differ between the features of {module}: give all of them one size")
UNDECLARED = Reason(
    "the KJT of {module} has features of undeclared sizes, {features}: declare them to its sharder, or give them in a "
    "KJT of their own"
)
OTHER_KERNEL = Reason("a table of {module} is looked up by {kind}: plan the compute kernel `fused`")
HOST_MEMORY = Reason(
    "a table of {module} lies in host memory, behind a cache that the host manages: plan it on the GPU"
)
COUNTS_STEPS = Reason(
    "the fused update of {module}, {optimizer}, is given numbers by the host that no graph follows: choose SGD, "
    "Adagrad or row-wise Adagrad without weight decay by counters, Adam or LAMB"
)
STEPS_STAY = Reason(
    "the fused update of {module}, {optimizer}, is given its step by the host, and here a captured graph keeps the one "
    "that it has: take a torch that has CUDAGraph.raw_cuda_graph_exec and a driver of CUDA 12.4 or later, or SGD, "
    "Adagrad or row-wise Adagrad"
)
ROUNDS_AT_RANDOM = Reason(
    "{module} rounds its weights at random, which no test compares: set stochastic_rounding=False, or fp32"
)
RATE_MOVES = Reason(
    "the tables' learning rate has changed with each of {steps} steps, and FBGEMM reads it on the host: here a graph "
    "must be captured anew for every rate, so change it in larger steps"
)
ON_HOST = Reason(
    "{field} stays a tensor in host memory, whose first values a graph would keep: move it to the device with the "
    "batch, or give it as a number"
)

# The model: keeps it out of graphs of the dense part too

NO_GPU = Reason("CUDA graphs need a GPU; the pipeline's device is {device}")
NO_DDP = Reason("the dense part is wrapped by {kind}, not by DistributedDataParallel")
COMM_HOOK = Reason("DistributedDataParallel has a communication hook, and a graphed all-reduce would leave it out")
UNUSED = Reason(
    "DistributedDataParallel has find_unused_parameters=True, by which a parameter may have a gradient on some ranks "
    "only, and graphs publish the same ones everywhere: use every parameter in every batch, and leave it out"
)
IGNORED = Reason(
    "DistributedDataParallel ignores {parameter}, whose gradients differ between ranks then, and a graphed all-reduce "
    "averages all: freeze it, or leave it out of params_to_ignore"
)
MIXED = Reason("DistributedDataParallel has {option}, and a graphed all-reduce would leave it out")
TRACKED = Reason("a model tracker counts the calls of the model, of which a graph makes none")
SHARED_PARAMETER = Reason("{parameter} is a parameter of the feature processors of {module} too: give each its own")
MODULE_HOOKS = Reason("hooks of {module} ({kind}) would run at captures only: remove them")
SCRIPTED = Reason(
    "{module} is compiled by torch.jit.script, and keeps its parameters where no graph can give it others: leave it "
    "uncompiled, or take torch.compile"
)
LATE_HOOKS = Reason(
    "hooks of {module} were added, or removed, after the pipeline was made, of which its graphs know nothing: make a "
    "new pipeline"
)
OWN_COLLECTIVES = Reason(
    "the model's own forward or backward exchanges between ranks, on some rank, and graphs of the dense part are "
    "replayed by some ranks and not by others: exchange in a hook marked by runs_in_graphs, or after progress()"
)
IN_BACKWARD = Reason(
    "{parameter} is updated in the backward (apply_optimizer_in_backward), which no graph does: give it to the "
    "optimizer"
)
GRADIENT_HOOKS = Reason(
    "{parameter} has gradient hooks, which a graph would not call: change gradients in the optimizer's step"
)
OBJECT = Reason(
    "{field} is a {kind}, whose values a graph cannot compare: give numbers, strings, arrays or tensors as fields"
)
READS_DEVICE = Reason("{line} reads the device from the host, which no graph can: {instead}")
READS_KJT = Reason(
    "the dense part reads the batch's KJT (.{attribute}), which a CUDA graph cannot: its shape changes with every "
    "batch; give what is needed of it as a tensor field of the batch"
)

# Optimizers: their step runs after the graph

DOES_MORE = Reason(
    "the step of {kind} may do more than launch kernels, which no replay does: it runs after the graph. If it does "
    "not, say so: `runs_in_graphs = True` in the class"
)
NOT_CAPTURABLE = Reason(
    "it is {kind}'s, which has no option `capturable`; Adam, AdamW, SGD and Adagrad are captured as they are"
)
OWN_STEP = Reason(
    "{kind} has a step of its own, which may do more than that of torch's class: if it only launches kernels, say so, "
    "`runs_in_graphs = True` in the class, or set capturable=True"
)
OWN_ZERO_GRAD = Reason(
    "{kind} has a zero_grad of its own, which no replay calls, and which may keep gradients: the step runs after the "
    "graph. If it only launches kernels, say so: `runs_in_graphs = True` in the class"
)
GIVEN_ZERO_GRAD = Reason("{kind} was given another zero_grad, which no replay calls, and which may keep gradients")
HOST_STATE = Reason("{kind} keeps its state {state} on the host: set capturable=True")
COMPLEX = Reason("{kind} has complex parameters")
WATCHED = Reason("hooks, or a step that somebody has put in its place, wait for calls of the optimizer's step")

# Iterations that run eagerly, on all ranks, and are counted

FIRST = Reason("the first {count} iterations run eagerly")
CHANGED = Reason("within {count} batches something had changed: {change}")
OTHER_FORM = Reason(
    "it, or the next batch, had another form than the first one on some rank, apart from declared numbers of ids "
    "(batch_ids)"
)
MANY_FORMS = Reason("{count} other numbers of ids (batch_ids) had come before its own, the most that have graphs")
AUTOCAST = Reason("autocast was {now}, and {first} for the first batches")
OVERFLOW = Reason(
    "more of its ids named rows of one rank than TrimmedEBCSharder's row_capacity has room for, on some rank, or no id "
    "of some feature named a row of one rank, where the fused update (Adam, LAMB, weight decay) changes rows whose "
    "gradient is zero"
)
SCALED = Reason("a gradient scaler leaves the scaling to the optimizer")

# Exchanges through peer memory

PEERS_ALONE = Reason("a single rank exchanges nothing")
PEERS_NO_GRAPH = Reason("only graphs of whole iterations exchange through peer memory, and there is none")
PEERS_APART = Reason("the ranks are on {hosts} machines, and GPUs access the memory of GPUs of their own machine only")
PEERS_UNSEEN = Reason(
    "the ranks do not see the same GPUs, or do not use one each: give all processes of a machine the same "
    "CUDA_VISIBLE_DEVICES, and each a GPU"
)
PEERS_NO_ACCESS = Reason("GPU {one} cannot access the memory of GPU {other}")
PEERS_NO_TRITON = Reason("rank {rank} has no Triton, whose kernels write to other GPUs: install it as torch pins it")
PEERS_QUANTISED = Reason("vectors are sent in a quantised format")
PEERS_OTHER_DIST = Reason("their {kind} neither copies columns nor adds the terms of all ranks")
PEERS_DTYPE = Reason("gradients are {dtype}, and the kernel adds fp32, bf16 and fp16")
PEERS_LARGE = Reason(
    "{bytes} bytes of gradients are many for {ranks} ranks, each of which would send all of its own to all: "
    "from {most} on, NCCL sends less"
)


@dataclass(frozen=True, slots=True)
class Section:
    """Reasons with one consequence."""

    title: str
    then: str
    reasons: tuple[Reason, ...]


SECTIONS = (
    Section(
        "Modules, inputs and tables",
        'An error before training; under `cuda_graph="iteration-or-dense"` a graph of the dense part alone.',
        (
            *(NOT_TRIMMED, PROCESSED_ROWS, PROCESSOR_HOOKS, READ_PAST, READS_SIZES, VALIDATES, GIVES_IDS),
            *(VARIABLE_BATCH, UNDECLARED, OTHER_KERNEL, HOST_MEMORY, COUNTS_STEPS, STEPS_STAY, ROUNDS_AT_RANDOM),
            *(RATE_MOVES, ON_HOST),
        ),
    ),
    Section(
        "The model",
        "An error; graphs of the dense part do not hold it either.",
        (
            *(NO_GPU, NO_DDP, COMM_HOOK, UNUSED, IGNORED, MIXED, TRACKED, SHARED_PARAMETER, SCRIPTED, MODULE_HOOKS),
            *(LATE_HOOKS, IN_BACKWARD, GRADIENT_HOOKS, OBJECT, READS_DEVICE, READS_KJT),
        ),
    ),
    Section(
        "Graphs of the dense part alone",
        'Off under `cuda_graph="dense"`, on all ranks; the graph of an iteration holds it.',
        (OWN_COLLECTIVES,),
    ),
    Section(
        "Optimizers of dense weights",
        "The dense update runs after the graph, which holds all else.",
        (DOES_MORE, OWN_STEP, OWN_ZERO_GRAD, GIVEN_ZERO_GRAD, NOT_CAPTURABLE, HOST_STATE, COMPLEX, WATCHED),
    ),
    Section(
        "Iterations",
        "They run eagerly, on all ranks together; `describe()` counts all but the first ones.",
        (FIRST, CHANGED, OTHER_FORM, MANY_FORMS, AUTOCAST, OVERFLOW, SCALED),
    ),
    Section(
        "Exchanges through peer memory",
        "The switch `peer_memory` is off, on all ranks, and NCCL exchanges everything.",
        (PEERS_ALONE, PEERS_NO_GRAPH, PEERS_APART, PEERS_UNSEEN, PEERS_NO_ACCESS, PEERS_NO_TRITON),
    ),
    Section(
        "Parts of these exchanges",
        'NCCL keeps them, within the graph; `describe()["peer_memory"]` names them.',
        (PEERS_QUANTISED, PEERS_OTHER_DIST, PEERS_DTYPE, PEERS_LARGE),
    ),
)
