"""Routes from vLLM on a CPU. Its ``--enable-return-routed-experts`` needs model runner V2 and so Triton. Here
model runner V1 passes the same data to the same vLLM components."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.v1.worker.cpu_worker import CPUWorker


class RoutesWorker(CPUWorker):
    """Passes the routes of each step to vLLM. Does not support asynchronous scheduling."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        self._routes = get_aux_output_connector(self.get_model(), self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output: Any) -> Any:
        self._routes.begin_step(scheduler_output.aux_output_connector_metadata)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        runner, batch = self.model_runner, self.model_runner.input_batch
        size = batch.num_reqs
        pending = self._routes.prepare_output(
            SimpleNamespace(
                req_ids=batch.req_ids,
                query_start_loc_np=runner.query_start_loc.np[: size + 1].copy(),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[:size].copy(),
            )
        )
        output = super().sample_tokens(grammar_output)
        if pending is not None:  # on tensor-parallel rank 0
            pending.enqueue_cpu_copy([len(tokens) for tokens in output.sampled_token_ids], [0] * size)
            output.aux_output_connector_output = pending.process_output()
        return output
