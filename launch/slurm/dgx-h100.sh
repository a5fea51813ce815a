# DGX H100: 8 GPUs on NVSwitch, 2 x 56 cores, 8 ConnectX-7 adapters of 400 Gb/s for computing, one to a GPU. Sourced by
# node.sh. From data sheets and NCCL's documentation: nothing here was measured on such a system yet.

RANKS_PER_NODE=8

# A rank's threads, and the pinned memory that they fill, stay on the socket of its GPU: batches otherwise cross the link
# between the sockets on their way.
BINDING=(--numa-binding node)

# The launching thread is the program; PyTorch's own pool would take cores from the readers.
export OMP_NUM_THREADS=1

# Kernels of many streams and communicators must not wait for one another in a hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS=32

# The adapters for computing. The others are for storage and management, and slower: NCCL would take them, too, and share
# its channels out evenly. Compare with ibstat, and correct the list.
export NCCL_IB_HCA=${NCCL_IB_HCA-mlx5_0,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_9,mlx5_10,mlx5_11}

# Set-up goes over an interface that leads to the other nodes: bridges of containers and virtual machines lead nowhere.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME-^lo,docker,virbr}

# What GPUs of equal local rank exchange stays on one rail of the fabric: no channel crosses to another adapter.
export NCCL_CROSS_NIC=0

# NVLink multicast takes memory and time at the start. Inside a node most exchanges go through peer memory, and all
# records of this harness are without it.
export NCCL_NVLS_ENABLE=0

# Where graphs are replayed over RDMA, buffers that NCCL has registered can hang them: github.com/NVIDIA/nccl/issues/2389.
export NCCL_GRAPH_REGISTER=0
