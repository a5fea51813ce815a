# DGX H100: 8 GPUs on NVSwitch, 2 x 56 cores, 8 ConnectX-7 compute adapters of 400 Gb/s, one per GPU. Sourced by
# node.sh. From data sheets and NCCL's documentation: not yet measured on such a system.

RANKS_PER_NODE=8

# A rank's threads, and the pinned memory that they fill, stay on the socket of its GPU: otherwise batches cross the
# link between the sockets.
BINDING=(--numa-binding node)

# The launching thread is the main thread; PyTorch's own thread pool would take cores from the readers.
export OMP_NUM_THREADS=1

# Kernels of many streams and communicators must not wait for one another in a hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS=32

# The compute adapters. The others are for storage and management, and slower: NCCL would use them too and divide its
# channels evenly. Compare with ibstat, and correct the list.
export NCCL_IB_HCA=${NCCL_IB_HCA-mlx5_0,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_9,mlx5_10,mlx5_11}

# Set-up must use an interface that reaches the other nodes; bridges of containers and virtual machines do not.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME-^lo,docker,virbr}

# Exchanges between GPUs of equal local rank stay on one rail of the fabric: no channel crosses to another adapter.
export NCCL_CROSS_NIC=0

# NVLink multicast takes memory and time at start-up. Within a node most exchanges use peer memory, and all records of
# this harness were made without multicast.
export NCCL_NVLS_ENABLE=0

# Graphs replayed over RDMA can hang on buffers that NCCL has registered: github.com/NVIDIA/nccl/issues/2389.
export NCCL_GRAPH_REGISTER=0
