"""Rows about vLLM's own connections between nodes, which a relay carries.

These rows are about changes of modules of vLLM: one name of a class, two names of a function, and
a function that is wrapped.
The replaced classes of torch have rows in ``r2serve/engines/torch/relies_on.py``.
"""

from __future__ import annotations

from r2serve.engines.vllm.classes import row
from r2serve.seams import Has, InOrder, Says, There

_PARALLEL = "vllm.config.ParallelConfig"
_QUEUES = "vllm.distributed.device_communicators.shm_broadcast"
_EXECUTOR = "vllm.v1.executor.multiproc_executor"
_WAIT = "vllm.v1.engine.utils.wait_for_engine_startup"

CONTROL_ROWS = (
    row(
        "entry point vllm.general_plugins",
        "moves listeners of torch to the node's virtual address in each process of an engine with "
        "a relay, before the process makes groups",
        "vLLM lets a plugin choose the address of listeners",
        There("vllm.plugins.DEFAULT_PLUGINS_GROUP", "'vllm.general_plugins'"),
        InOrder("vllm.v1.engine.core.EngineCore.__init__", ("load_general_plugins",)),
        InOrder(
            "vllm.v1.worker.worker_base.WorkerWrapperBase.init_worker", ("load_general_plugins",)
        ),
    ),
    row(
        "addresses in ParallelConfig",
        "meets the other nodes at the user's master address, and puts virtual addresses in its "
        "place before vLLM listens",
        "",
        Has(
            _PARALLEL,
            (
                "data_parallel_backend",
                "data_parallel_external_lb",
                "data_parallel_master_ip",
                "data_parallel_rank",
                "data_parallel_rank_local",
                "data_parallel_rpc_port",
                "data_parallel_size",
                "data_parallel_size_local",
                "distributed_executor_backend",
                "distributed_timeout_seconds",
                "master_addr",
                "master_port",
                "nnodes",
                "node_rank",
            ),
        ),
        InOrder(
            "vllm.distributed.parallel_state.init_distributed_environment",
            (
                "parallel_config.master_addr",
                "parallel_config.master_port",
                "get_distributed_init_method",
            ),
        ),
        Says("file:vllm/v1/engine/utils.py", ("host = parallel_config.data_parallel_master_ip",)),
    ),
    row(
        "VLLM_HOST_IP",
        "has the node's virtual address, which message queues announce to other nodes; the real "
        "address is kept for r2serve's control rail",
        "",
        There("vllm.envs.VLLM_HOST_IP"),
        InOrder("vllm.utils.network_utils.get_ip", ("envs.VLLM_HOST_IP",)),
        InOrder(f"{_EXECUTOR}.MultiprocExecutor._init_executor", ("MessageQueue", "get_ip")),
        InOrder(f"{_QUEUES}.MessageQueue.__init__", ("get_ip",)),
    ),
    row(
        "get_ip of message queues",
        "replaced in two modules where the configuration announces the engine's address to other "
        "jobs (KV connectors, EC connectors, KV events): VLLM_HOST_IP then stays",
        "vLLM has an address for message queues alone",
        Has(
            "vllm.config.VllmConfig",
            ("ec_transfer_config", "kv_events_config", "kv_transfer_config"),
        ),
        InOrder(f"{_EXECUTOR}.MultiprocExecutor._init_executor", ("MessageQueue", "get_ip")),
        InOrder(f"{_QUEUES}.MessageQueue.__init__", ("get_ip",)),
    ),
    row(
        "TCPStore in vllm.distributed.utils",
        "replaced by a subclass that listens at the node's virtual address",
        "a TCPStore listens at its host_name only",
        InOrder("vllm.distributed.utils.create_tcp_store", ("TCPStore", "master_listen_fd=")),
        InOrder("vllm.distributed.utils.init_gloo_process_group", ("ProcessGroupGloo", "timeout=")),
    ),
    row(
        "wait_for_engine_startup",
        "wrapped at node 0 of a data-parallel engine without a relay: its ZMQ socket, the first "
        "argument, also answers nodes with a relay, and then ends the start; relies on an error "
        "about any other sender, and on identities of two bytes",
        "vLLM compares the environment of nodes before their ranks meet",
        InOrder(
            _WAIT,
            (
                "poller.register",
                "handshake_socket.recv_multipart",
                "handshake_socket.send_multipart",
            ),
        ),
        InOrder(
            "vllm.v1.engine.utils.launch_core_engines",
            ("zmq_socket_ctx", "zmq.ROUTER", "CoreEngineProcManager", "wait_for_engine_startup"),
        ),
        Says(
            "file:vllm/v1/engine/utils.py",
            (
                "def wait_for_engine_startup(handshake_socket: zmq.Socket,",
                "eng_identity, ready_msg_bytes = handshake_socket.recv_multipart()",
                "Message from engine with unexpected data parallel rank",
                'index.to_bytes(2, "little")',
            ),
        ),
    ),
    row(
        "names of API servers",
        "spares the processes that answer clients, while the end of the relay ends the engine",
        "",
        Says("file:vllm/v1/utils.py", ('name=f"ApiServer_{i}"',)),
    ),
)
