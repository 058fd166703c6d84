"""Client of vLLM servers over HTTP. Nothing here imports vLLM."""
