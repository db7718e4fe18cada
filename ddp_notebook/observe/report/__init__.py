"""Report on a training cell, in numbers and sentences.

report             breakdown of step times, causes, and advice
advice             the verdict in one sentence, and suggestions
bubbles            idle share of a pipeline, and how to reduce it
cores              ranks that are ready to run without a free core; ranks that share a core
effective_batch    samples of an optimizer step on all ranks together
without_optimizer  pipelines, remote calls and inference of cells without an optimizer step
loading            settings of DataLoaders, and suggestions
outside            time outside of steps: evaluation, checkpoints, before and after the steps
page_faults        page faults: memory that steps request from the system again
memory_growth      growth of resident memory
network_waits      waits for the network between machines
rpc_sentences      RPC calls: callees, waiting callers, queues
bandwidth          bytes per second by operation and size
"""
