"""Faults of the serving engine, its command and the PyTorch package; see faults.py."""

from faults import of

# fmt: off

# --- serving ----------------------------------------------------------------------------------------------------------
fault = of("jax_sparse_mla/serving/decoder.py", "tests/serving/test_looped_layers.py")
fault("loop-caches", "all repetitions of a loop take the first one's cache", "number * each", "0 * each")
fault = of("jax_sparse_mla/serving/params.py", "tests/serving/test_looped_layers.py")
fault("loop-weights", "and its weights", "part = array[number]", "part = array[0]")
fault("packed-shift", "a layer's small parameters are read from the place before them",
      "self.packed[number][begin : begins[number]]", "self.packed[number][max(begin - 1, 0) :][: math.prod(shape)]")
fault("loop-widens", "a loop widens the bfloat16 weights of all its layers at once",
      "if array.dtype == jnp.bfloat16 else", "if array.dtype == jnp.float64 else")
fault = of("jax_sparse_mla/serving/engine.py", "tests/serving/test_looped_layers.py")
fault("loop-not", "an engine on a CPU compiles each layer",
      'device.platform == "cpu" and hasattr', 'device.platform == "no" and hasattr')
fault = of("jax_sparse_mla/serving/deepseek_v32.py", "tests/serving/test_expanded.py")
fault("expanded-causal", "rows attend to those behind them", "is_causal=True", "is_causal=False")
fault("expanded-scale", "scores are scaled by the width of a key", "scale=spec.softmax_scale", "scale=None")
fault("expanded-write", "the chunk's rows are not written", "cache = write_v32(cache, rows, inputs.batch, metadata)",
      "pass")
fault("expanded-shorter", "what selects is not all that a row sees", "max_seq_len <= config.spec.index_topk",
      "max_seq_len <= 2 * config.spec.index_topk")
fault = of("jax_sparse_mla/serving/mesh.py", "tests/serving/test_expanded.py")
fault("expanded-share", "a share does what another one may", "all(expanded)", "any(expanded)")
fault = of("jax_sparse_mla/serving/plan.py", "tests/serving/test_expanded.py")
fault("expanded-rest", "the rest of a prompt attends to itself alone", "and self.starts[0] == 0", "")
fault("expanded-two", "a prompt's rows attend to another's", "len(self.requests) == 1 and", "")
fault = of("jax_sparse_mla/serving/engine.py", "tests/serving/test_expanded.py")
fault("expanded-chosen", "a chosen backend does not serve", "if chosen or options.batch_invariant",
      "if options.batch_invariant")
fault = of("jax_sparse_mla/serving/scheduler.py", "tests/serving/test_scheduler.py")
fault("width-answers", "answers widen the steps that read prompts", "most = self._longest_prompt if mode",
      "most = self._widest if mode")
fault = of("jax_sparse_mla/serving/sampling.py", "tests/serving/test_sampling.py")
fault("sampling-seed", "the draws of a request are the same at each position",
      "jax.random.fold_in(jax.random.key(seed), position)", "jax.random.key(seed)")
fault("sampling-top-p", "top_p keeps a token at exactly p", "(before < top_p)", "(before <= top_p)")
fault("sampling-temperature", "the temperature multiplies",
      "logits / jnp.maximum(params", "logits * jnp.maximum(params")
fault = of("jax_sparse_mla/serving/request.py", "tests/serving/test_scheduler.py",
           "tests/serving/test_serving_engine.py")
fault("end-token", "a request ends where its first token is an end token",
      "self.output[-1] in self.eos_token_ids", "self.output[0] in self.eos_token_ids")
fault = of("jax_sparse_mla/serving/prefix.py", "tests/serving/test_scheduler.py")
fault("prefix-digest", "a page's digest does not hang on the pages before it", "hashlib.sha256(digest + data[",
      "hashlib.sha256(data[")
fault = of("jax_sparse_mla/serving/pages.py", "tests/serving/test_pages.py")
fault("page-leak", "the pages of a request that ends are not given back",
      "            self.pages.give_back(page)\n", "            pass\n")
fault("window-page-leak", "the first page of the window is not given back",
      "len(pages) >= self._first_in_window[row]", "len(pages) > self._first_in_window[row]")
fault("window-page-early", "a window page is freed a token early",
      "first = min(max(0, length + 1 - self.window)", "first = min(max(0, length + 2 - self.window)")
fault("shared-pages-turns", "a request takes all its pages of the first device",
      "device = index % len(self._free)", "device = 0 * index")
fault("shared-pages-available", "pages of any device count for a request",
      "len(self._free) * min(map(self._available", "sum(map(self._available")
fault = of("jax_sparse_mla/layers/layer.py", "tests/layers/test_shared_pages.py")
fault("shared-index-keys", "all devices score the keys of the first one's pages",
      "n)[:, :, rank] // n", "n)[:, :, 0] // n")
fault = of("jax_sparse_mla/layers/write.py", "tests/layers/test_shared_pages.py")
fault("shared-entries", "every device writes every entry",
      "if pages_axis is not None and kind.owns_kv:", "if False:")
fault = of("jax_sparse_mla/attention/extend.py", "tests/layers/test_shared_pages.py")
fault("shared-gather", "a chunk sees the entries of the first device's slots only",
      "num_slots *= lax.axis_size(pages_axis)", "num_slots *= 1")
fault = of("jax_sparse_mla/attention/context_parallel.py", "tests/layers/test_shared_pages.py")
fault("shared-window", "every device attends to the first one's turn of the window",
      "jnp.where(turns >= 0, rule.position(turns, rank), -1)", "jnp.where(turns >= 0, rule.position(turns, 0), -1)")
fault = of("jax_sparse_mla/serving/scheduler.py", "tests/serving/test_scheduler.py")
fault("preemption-order", "the first request is preempted, not the last",
      "victim = self.running[-1]", "victim = self.running[0]")
fault("admission-reserved", "admission ignores what running prompts will need: requests preempt each other for ever",
      "reserved + needed + reused > self.pool.pages.available", "needed + reused > self.pool.pages.available")
fault("admission-reread", "a preempted request comes back without a reserve",
      "needed += turns(1) * len(self.running)", "needed += 0")
fault("turns-prompts-first", "nobody decodes while there is a prompt to read",
      "if prefill and not (ready and self._read_last):", "if prefill:")
fault("turns-prompts-last", "no prompt is read while somebody decodes",
      "if prefill and not (ready and self._read_last):", "if prefill and not ready:")
fault("invariant-chunks", "batch invariant steps read several prompts",
      "prefill[:1] if self.options.batch_invariant else prefill", "prefill")
fault("invariant-width", "batch invariant steps have page tables as wide as their longest request",
      "        if self.options.batch_invariant:\n            return self.pool.req_to_token.shape[1]\n", "")
fault("end-token-in-drafts", "an end token inside accepted drafts does not end the request",
      "request.row is None or request.finished or request.output[-1] != token",
      "request.row is None or request.output[-1] != token")
fault("prefix-last-token", "a prompt that was read before leaves no token to compute",
      "page_digests(known[:-1], self.spec.page_size)", "page_digests(known, self.spec.page_size)")
fault("chunk-budget", "a step reads more than its chunk",
      "                budget -= count\n", "                budget -= 0\n")
fault("verify-computed", "after drafts a token counts as computed that is not",
      "int(plan.starts[i]) + len(request.output) - start", "int(plan.starts[i]) + len(request.output) - start + 1")
fault("states-before-the-step", "carried states are kept before the step that makes them",
      "            restored=restored,\n            kept=kept,\n",
      "            restored=restored + kept,\n            kept=[],\n")
fault = of("jax_sparse_mla/serving/plan.py", "tests/serving/test_scheduler.py")
fault("step-follows-mapped", "a step follows although pages were mapped",
      "            and not len(self.mapped)\n", "")
fault = of("jax_sparse_mla/serving/scheduler.py", "tests/serving/test_for_servers.py")
fault("end-untold", "a request that is cancelled while it waits is not told of its end",
      "for request in running + waiting:", "for request in running:")
fault("end-aborted-untold", "an abort tells nobody", "        self._end_all(ABORTED)\n", "")
fault("end-reason", "an end token that is the last allowed one counts as the length",
      "how = STOP if request.output[-1] in request.eos_token_ids else how", "how = how")
fault("adjust-reused", "penalties forget what was generated before a preemption and is not read again",
      "known = request.prompt if request.adjust else request.tokens", "known = request.tokens")
fault = of("jax_sparse_mla/serving/step.py", "tests/serving/test_for_servers.py")
fault("counts-of-prompts", "penalties count the prompt",
      "behind = positions >= prompt_of", "behind = positions >= 0 * prompt_of")
fault("counts-kept", "a row's counts are those of the request before, too",
      "jnp.where(starts < prompts, rows, num_rows)", "jnp.where(starts < 0, rows, num_rows)")
fault("logprobs-of-others", "log-probabilities are those of the most likely token",
      "log_probs(own, tokens, MOST", "log_probs(own, greedy(own)[0], MOST")
fault("pages-ahead", "pages that are mapped before a step are not those of its own",
      "rest, plan.mapped = mapped[room:], mapped", "rest, plan.mapped = mapped[:0], mapped")
fault = of("jax_sparse_mla/serving/scheduler.py", "tests/serving/test_engine_faults.py")
fault("failed-not-ended", "a token of logits that are not finite is taken", "if math.isnan(margin):", "if False:")
fault("failed-reused", "pages of a request whose logits were not finite are reused",
      "            self.prefixes.forget(self.pool.pages_of(request.row))\n", "            pass\n")
fault("interrupt-tables", "after an interrupt the tables go on as they are",
      "        vars(self.pool).update(vars(self._new_pool()))", "        pass")
fault = of("jax_sparse_mla/serving/step.py", "tests/serving/test_speculative.py")
fault("draft-layer-position", "the draft layer's tokens stand a position too far",
      "drafted[-1], parts, i - 1)", "drafted[-1], parts, i)")
fault("first-layer-draft-position", "the first layer's drafts all stand at one position",
      "drafted[-1], parts, i)", "drafted[-1], parts, 0)")
fault("draft-layer-last-row", "the next round's drafts begin at a round's last row, accepted or not",
      "jnp.arange(len(rows)) * (steps + 1) + accepted", "jnp.arange(len(rows)) * (steps + 1) + steps")
fault = of("jax_sparse_mla/serving/dspark.py", "tests/serving/test_dspark.py")
fault("block-window", "a block sees a window that ends a token too early",
      "starts[:, None] - window + jnp.arange", "starts[:, None] - window - 1 + jnp.arange")
fault("block-positions", "a block stands a position too far",
      "(starts[:, None] + jnp.arange(size))", "(starts[:, None] + 1 + jnp.arange(size))")
fault("block-sink", "a drafter's attention has no sink", "+ jnp.exp(sink - largest))", ")")
fault("block-markov", "the table of tokens reads the block's first one",
      "params.draft.markov_rows[tokens]", "params.draft.markov_rows[block[::size]]")
fault("block-rejected", "rejected tokens leave keys",
      "(positions < behind) & (positions", "(positions >= 0) & (positions")
fault("block-gap", "a block sees keys from before a gap", "first, end = jnp.maximum(begins, ends - window)",
      "first, end = jnp.maximum(0, ends - window)")
fault("block-forget", "a drafter sees the text of its row's last request",
      'draft.ends.at[rows].set(0, mode="drop")', 'draft.ends.at[rows].add(0, mode="drop")')
fault("block-nan", "a drafter takes NaN of its row's last request",
      "kept = jnp.where(visible[:, None, :, None], kept, 0)", "kept += 0")
fault("block-trained", "a block of fewer drafts has fewer rows", "size = max(drafter.block, count)", "size = count")
fault = of("jax_sparse_mla/serving/model.py", "tests/serving/test_dspark.py")
fault("block-targets", "a drafter reads the layers before its targets",
      "if run.first in targets:", "if run.first + 1 in targets:")
fault("block-loop", "a loop takes a drafter's targets", "i if i in targets else None", "None")
fault = of("jax_sparse_mla/serving/step.py", "tests/serving/test_dspark.py")
fault("block-first-page", "a request begins in a step that does not know",
      'np.argsort(plan.mapped[:, 1] > 0, kind="stable")', "np.arange(len(plan.mapped))")
fault("block-accepted", "an accepted token leaves no keys",
      "starts + accepted + 1, starts)", "starts + accepted, starts)")
fault = of("jax_sparse_mla/serving/checkpoint.py", "tests/serving/test_dspark.py")
fault("block-confidence", "a released drafter is refused",
      "|shared_head\\.head|confidence_head)", "|shared_head\\.head)")
fault = of("jax_sparse_mla/serving/step.py", "tests/serving/test_serving_engine.py")
fault("accepted-drafts", "drafts behind a rejected one are accepted",
      "jnp.cumprod((drafts[:, 1:] == chosen[:, :-1]).astype(jnp.int32), 1).sum(1)",
      "(drafts[:, 1:] == chosen[:, :-1]).astype(jnp.int32).sum(1)")
fault = of("jax_sparse_mla/serving/engine.py", "tests/serving/test_serving_engine.py")
fault("engine-choice", "a request with a temperature is served greedily", "if request.sampling.temperature > 0]",
      "if request.sampling.temperature > 1]", why="the engine's tests take a temperature of 30 alone")
fault("engine-states-before", "carried states are kept before the step that makes them",
      "        if plan.restored:\n            self.copy_states(plan.restored)\n",
      "        self.copy_states(plan.restored + plan.kept)\n        plan.kept = []\n")
fault = of("jax_sparse_mla/serving/engine.py", "tests/serving/test_engine_faults.py")
fault("interrupt-caches", "caches that a failed step took along are used", "if not _is_sound(self.state):", "if False:")
fault("interrupt-stale", "what an interrupted step has left is taken for a step that runs",
      "            self._recover()\n\n    def _recover", "            pass\n\n    def _recover")
fault("callback-runs", "a callback runs steps within a step",
      "        if self._is_within(sys._getframe(2), *callers):\n", "        if False:\n")
fault("chunk-buckets", "every prompt is padded to the chunk",
      "power_of_two(plan.num_tokens)), options.chunk_size)", "options.chunk_size), options.chunk_size)")
fault("implicit-copy", "a step's array is copied implicitly",
      'jax.transfer_guard("allow"):  # `device_put`', "activity.show(program.mode.value):  # `device_put`")
fault = of("jax_sparse_mla/serving/step.py", "tests/serving/test_engine_faults.py")
fault("rank-promotion", "steps depend on the caller's rank promotion", 'jax.numpy_rank_promotion("allow")',
      "jax.named_scope(program.mode.value)")
fault("not-finite", "logits that are not finite are not seen",
      "jnp.where(finite, margins, jnp.nan)", "jnp.nan_to_num(margins)")
fault = of("jax_sparse_mla/serving/engine.py", "tests/serving/test_batch_invariant.py")
fault("invariant-batch", "batch invariant decode steps are as large as their requests",
      "least = options.max_batch if options.batch_invariant else 1", "least = 1")
fault("invariant-rows", "batch invariant chunks are as large as their prompts",
      "least = options.chunk_size if options.batch_invariant else SMALLEST_CHUNK", "least = SMALLEST_CHUNK")
fault = of("jax_sparse_mla/serving/mesh.py", "tests/serving/test_scheduler.py")
fault("mesh-modes", "over a mesh, kinds of steps take no turns",
      "key=lambda kind: self._kinds.index(kind) if kind in self._kinds else -1", "key=wanted.index")
fault = of("jax_sparse_mla/serving/checkpoint.py", "tests/serving/test_checkpoint.py")
fault("checkpoint-name", "the down projection of released V4 files has no name", r'(r"\.w2\.", ".down_proj."),',
      r'(r"\.w2\.", ".down."),')
fault = of("jax_sparse_mla/serving/tensors.py", "tests/serving/test_models_transformers.py")
fault("checkpoint-gate-up", "gate and up are exchanged", '("gate_proj", "up_proj")]', '("up_proj", "gate_proj")]')
fault = of("jax_sparse_mla/serving/config.py", "tests/serving/test_config.py")
fault("config-rope-magnitude", "yarn's magnitude is the product of both mscales",
      "yarn_mscale(factor, mscale) / yarn_mscale(", "yarn_mscale(factor, mscale) * yarn_mscale(")
fault("config-rope-low", "yarn's frequencies are divided from the slow end on",
      "low = max(math.floor(pair_with(self.beta_fast)), 0)", "low = max(math.floor(pair_with(self.beta_slow)), 0)")
fault = of("jax_sparse_mla/serving/config.py", "tests/serving/test_models_transformers.py")
fault("config-rope-of-ratio", "layers without compression turn by the compressed layers' frequencies",
      "self.compress_rope if ratio else self.window_rope", "self.compress_rope")
fault = of("jax_sparse_mla/serving/moe.py", "tests/serving/test_models_transformers.py")
fault("moe-bias", "experts are chosen without the correction bias",
      "choose(scores.astype(jnp.float32) + bias, config)", "choose(scores.astype(jnp.float32), config)")
fault = of("jax_sparse_mla/serving/moe.py", "tests/serving/test_moe.py")
fault("moe-groups", "a group counts by its best expert alone",
      "lax.top_k(grouped, 2)[0].sum(axis=-1)", "lax.top_k(grouped, 1)[0].sum(axis=-1)")
fault = of("jax_sparse_mla/serving/layers.py", "tests/serving/test_models_transformers.py")
fault("swiglu-limit", "the up projection is cut at one end only",
      "jnp.clip(up, -limit, limit)", "jnp.minimum(up, limit)")
fault = of("jax_sparse_mla/serving/deepseek_v4.py", "tests/serving/test_models_transformers.py")
fault("v4-output-rope", "V4's output is turned forward again", "inv_freq, inverse=True)", "inv_freq, inverse=False)")
fault = of("jax_sparse_mla/serving/kda.py", "tests/serving/test_kda.py")
fault("kda-convolution", "the short convolution's weights are in reverse",
      "weight[:, kernel - 1 - back]", "weight[:, back - 1]")
fault("kda-fresh", "a new request begins with the state of the one before", "fresh=first == 0", "fresh=first == -2")
fault = of("jax_sparse_mla/serving/hyper_connections_triton.py", "tests/serving/test_hyper_connections_triton.py")
fault("triton-hyper-connections", "Triton hyper-connections: one iteration too many",
      "range(ITERATIONS)", "range(ITERATIONS + 1)")
fault = of("jax_sparse_mla/serving/quantised.py", "tests/serving/test_quantised.py")
fault("quantised-fp8", "FP8 weights are divided by their scales", "(values * scales)", "(values / scales)")
fault("quantised-part", "a part of a quantised weight has the first rows' scales",
      "scales[start // rows : stop // rows]", "scales[: (stop - start) // rows]")
fault = of("jax_sparse_mla/serving/hyper_connections_triton.py", "tests/serving/test_hyper_connections_triton.py")
fault("streams-mixing-rows", "streams mix by the transposed matrix",
      "comb_ptr + t * (N * N) + i * N + j", "comb_ptr + t * (N * N) + j * N + i")
fault("streams-weights-rounded", "the mixing's weights are two bfloat16 numbers",
      "tl.static_range(3)", "tl.static_range(2)")
fault("streams-norm-rounding", "a bfloat16 norm is applied before rounding",
      "norm_ptr.dtype.element_ty == tl.bfloat16", "N == 0")
fault = of("jax_sparse_mla/serving/heads_triton.py", "tests/serving/test_heads_triton.py")
fault("heads-pairs", "a head's first channels are rotated", "- (DIM - ROPE_DIM) // 2", "+ 0")
fault("heads-rounding", "a head is not rounded before it is rotated",
      "        x = x.to(tl.bfloat16).to(tl.float32)\n    if ROPE_DIM", "    if ROPE_DIM")
fault = of("jax_sparse_mla/serving/sampling.py", "tests/serving/test_sampling.py")
fault("greedy-second", "a margin is the distance from the best of the other half",
      "jnp.maximum(jnp.minimum(x, y), ", "jnp.maximum(x * 0 - jnp.inf, ")
fault("greedy-finite", "one logit that is finite is enough", "x_finite & y_finite", "x_finite | y_finite")
fault = of("jax_sparse_mla/serving/quantised_triton.py", "tests/serving/test_quantised_triton.py")
fault("quantised-scale-rows", "every scale of FP8 is taken for 128 rows", "n // SCALE_ROWS", "n // 128")
fault = of("jax_sparse_mla/serving/quantised_cuda.py", "tests/serving/test_expert_rows.py")
fault("few-rows-steps", "CUDA kernels take weights of half a step", "% STEP_BYTES or", "% STEP_BYTES < 0 or")
fault("few-rows-limit", "a SwiGLU in the kernel of few rows has no limit", "float(limit or 0)", "0.0")
fault = of("jax_sparse_mla/serving/quantised_cuda.py", "tests/serving/test_expert_tiles.py")
fault("many-rows-idle", "the kernel of many rows leaves multiprocessors without a tile", ">= device.sm_count", ">= 0")
fault("many-rows-fp8", "a few FP8 rows of an expert take the kernel of many", "rows >= FROM_ROWS", "rows >= 0")
fault = of("jax_sparse_mla/serving/model.py", "tests/serving/test_quantised.py")
fault("loop-formats", "layers whose weights have other formats are one loop", "signature(params.layers[i])", "None")

# --- PyTorch ----------------------------------------------------------------------------------------------------------
fault = of("jax_sparse_mla/server/app.py", "tests/serving/test_server.py")
fault("server-gone", "a client that goes is served on",
      "gone.add_done_callback(lambda _: self._job.request.cancel())", "gone.add_done_callback(lambda _: None)")
fault("server-end-token", "an end token's text is sent", "if token in self._eos:", "if False:")
fault("server-usage", "a stream says more tokens than it has",
      "        self.tokens += 1\n", "        self.tokens += 2\n")
fault("server-key", "half a key will do", "key.strip().encode", "self._key.decode().encode")
fault("server-body", "a body may have any size", "if len(body) > self._most_body:", "if False:")
fault("server-content-type", "a page of any site can ask", '!= "application/json":', '== "image/png":')
fault("server-given-up", "a step that does not end holds up the end", "job.given_up = True", "job.given_up = False")
fault = of("jax_sparse_mla/server/runner.py", "tests/serving/test_server.py")
fault("runner-coming", "what has just come when a step fails is not answered",
      "for request in list(self._open):", "for request in ():")
fault("runner-limit", "the queue has no end", "if len(self._open) >= self.limit:", "if False:")
fault("runner-refusing", "a runner that has failed takes requests", "if self.refusing is not None:", "if False:")
fault("runner-ends", "what waits when the server ends is said to have failed",
      "request.end(ABORTED if self.failure is None else FAILED)", "request.end(FAILED)")
fault = of("jax_sparse_mla/server/protocol.py", "tests/serving/test_server_refusals.py")
fault("protocol-unknown", "a field that is not served is ignored", 'raise _wrong(name, f"{name} is not served here',
      'log = (name, f"{name} is not served here')
fault("protocol-seed", "requests share a seed",
      "secrets.randbits(32) if seed is None else seed", "0", why="the test of draws is long")
fault = of("jax_sparse_mla/server/text.py", "tests/serving/test_server_text.py")
fault("stops-held", "the beginning of a stop string is sent", "(len(stop) for stop in self._stops), default=1) - 1",
      "(len(stop) for stop in self._stops), default=1) - 2")
fault("text-waiting", "what is no UTF-8 waits for ever", "== MOST_WAITING:", "== -1:")
fault("stops-end", "what is held back is lost", "        return self._held\n", '        return ""\n')
fault("template-sandbox", "a chat template is not kept in a sandbox",
      "environment = ImmutableSandboxedEnvironment(", "environment = jinja2.Environment(")
fault = of("jax_sparse_mla/cli/start.py", "tests/generate/test_first_lines.py")
fault("first-line-late", "the first line waits for JAX", "import os\n\nfrom", "import os\n\nimport jax\n\nfrom")
fault("first-line-plugin", "the driver's GPU is announced where JAX has no plug-in", " or not has_cuda_plugin()", "")
fault = of("jax_sparse_mla/cli/setup.py", "tests/generate/test_first_lines.py")
fault("first-line-stays", "a device that JAX does not use stays announced", "!= args.announced:", "is None:")
fault = of("jax_sparse_mla/__init__.py", "tests/contract/test_contract.py")
fault("lazy-package", "importing the package imports JAX", '__version__ = "0.1.0"', 'import jax; __version__ = "0.1.0"')
fault = of("jax_sparse_mla/cli/listen.py", "tests/serving/test_server.py")
fault("drain-at-once", "nothing is finished after a signal", "over = self.signals > 1 or", "over = True or")
fault("drain-second", "a second signal is not heard", "over = self.signals > 1 or", "over =")
fault = of("interop/sparse_mla_torch/flash_mla.py", "tests/torch_face/test_flash_mla_drop_in.py")
fault("drop-in-empty-lse", "a row without a key has an lse of −inf, FlashMLA's is +inf",
      '_INF = float("inf")', '_INF = -float("inf")')
fault("drop-in-schedule", "a schedule serves a call of another shape",
      "elif meta.config != shape:", "elif meta.config is None:")
fault = of("interop/sparse_mla_torch/attention/decode.py", "tests/torch_face/test_mosaic_launch.py")
fault("drop-in-row-stride", "index rows that stand apart are read as one block",
      "return of_batch if batch > 1 else topk", "return topk")
fault = of("interop/sparse_mla_torch/attention/backends/__init__.py", "tests/torch_face/test_flash_mla_drop_in.py")
fault("drop-in-log2", "lse in base 2 is not", "lse.mul_(_LOG2_E)", "lse")
fault = of("interop/sparse_mla_torch/attention/backends/__init__.py", "tests/torch_face/test_mosaic_launch.py")
fault("heads-apart", "queries whose heads stand apart are read as dense",
      "of_head != values or of_token % values", "of_token % values")
fault = of("interop/sparse_mla_torch/attention/backends/hopper.py", "tests/torch_face/test_mosaic_launch.py")
fault("prefill-q-heads", "queries among an engine's padding are read as dense", "heads_apart(q) or heads", "heads")
fault("prefill-indices-stride", "prefill reads index rows that stand apart as one block",
      "table.topk, table.stride or table.topk, blocks", "table.topk, table.topk, blocks")
fault("prefill-blocks", "prefill launches a block for each multiprocessor, though there are fewer items",
      "min(items, route", "max(items, route")
fault = of("interop/sparse_mla_torch/attention/prefill.py", "tests/torch_face/test_mosaic_launch.py")
fault("warm-up-in-turn", "kernels are compiled one after the other",
      "ThreadPoolExecutor(len(shapes))", "ThreadPoolExecutor(1)")
fault("warm-up-override", "kernels are compiled though another backend is named",
      ' and override_of("prefill") in (None, "hopper")', "")
fault = of("interop/sparse_mla_torch/launch/mosaic.py", "tests/torch_face/test_mosaic_launch.py")
fault("mosaic-numbers", "a number is passed as another", "(256 * number).to_bytes", "(128 * number).to_bytes")
fault("mosaic-order", "tensors go to the parameters in the order of the arrays",
      "tuple(order[i] for i in compiled.parameters)", "tuple(order[: len(compiled.parameters)])")
fault = of("jax_sparse_mla/launch/mosaic.py", "tests/torch_face/test_mosaic_launch.py")
fault("mosaic-file", "a file without the code is read", "or not data.startswith(", "or data.startswith(")
fault("mosaic-elf", "the code ends with the first of its last tables", "return max(segments", "return min(segments")
fault("mosaic-version", "an older JAX is taken to compile for a launch without XLA",
      "jax.__version_info__ < (0, 11, 1)", "jax.__version_info__ < (0, 10, 1)")
fault = of("jax_sparse_mla/attention/hopper/prefill/alone.py", "tests/torch_face/test_mosaic_launch.py")
fault("prefill-kernel-heads", "8 heads take the kernel of 16", "heads <= most)", "heads < most)")
fault("prefill-items", "128 heads are one item", "-(-heads // 64)", "-(-heads // 128)")
fault("prefill-carried", "kernels that a wheel carries are not used with an older JAX",
      "all(compile_cache.is_carried(each) for each in libraries())", "False")
fault = of("jax_sparse_mla/attention/hopper/prefill/tiles.py", "tests/torch_face/test_mosaic_launch.py")
fault("prefill-sizes", "the kernel takes the number of keys for that of index columns",
      "    keys: jax.Array  # rows of kv\n    columns: jax.Array  # of indices\n",
      "    columns: jax.Array  # of indices\n    keys: jax.Array  # rows of kv\n")
fault = of("interop/sparse_mla_torch/handover.py", "tests/torch_face/test_handover.py")
fault("handover-ring", "the oldest token of the compressor's ring is left behind",
      "max(0, place.computed - window), place.computed)", "max(0, place.computed - window + 1), place.computed)")
fault("handover-window", "the first page of the window is left behind",
      "max(0, computed + 1 - window) // page_size", "max(0, computed + page_size - window) // page_size")
fault("handover-scales", "other requests' scales are left in a page",
      "pages[-1, entries * row_bytes + used * scale_bytes :] = 0", "pages[-1, pages.shape[1] :] = 0")
fault("handover-sampling", "a request goes on with the most likely tokens",
      "output, sampling=sampling, **asked", "output, **asked")
fault("handover-no-token-left", "a request that has no token left to make is taken",
      "if not total - prompt < max_new_tokens", "if not total - prompt <= max_new_tokens")
fault = of("interop/sparse_mla_torch/bridge.py", "tests/torch_face/test_bridge.py")
fault("bridge-strides", "a tensor with strides goes to JAX as it is",
      "    if not tensor.is_contiguous():\n", "    if tensor.is_sparse:\n")
fault = of("interop/sparse_mla_torch/ops.py", "tests/torch_face/test_torch_library.py")
fault("ops-split-slots", "a page split without slots copies every second page",
      "k_cache.shape[0] * k_cache.shape[1], k_cache.shape[1])",
      "k_cache.shape[0] * k_cache.shape[1], 2 * k_cache.shape[1])")
fault = of("interop/sparse_mla_torch/engines.py", "tests/torch_face/test_engines.py")
fault("engines-blocks", "a block that no token reached is in use",
      "* block_size < lens[:, None]", "* block_size <= lens[:, None]")
fault("engines-draft-step", "a draft step does not attend to its own token",
      "index + 1 if shift_seq_lens else 0", "index if shift_seq_lens else 0")
fault = of("interop/sparse_mla_torch/plugins/vllm.py", "tests/torch_face/test_plugins.py")
fault("plugin-selection", "vLLM gets our V4 layer where the flag does not say so",
      '"name", None) != NAME:', '"name", None) == "none":')
fault = of("interop/sparse_mla_torch/plugins/calls.py", "tests/torch_face/test_plugins.py")
fault("plugin-failure", "what has failed is asked again", "_off.add(function)", "_off.discard(function)")
fault = of("interop/sparse_mla_torch/plugins/sglang.py", "tests/torch_face/test_sglang_plugin.py")
fault("plugin-sink", "the sink keeps the heads that SGLang pads",
      "return q[:, :, :heads], None if sink is None else sink[:heads]", "return q[:, :, :heads], sink")
fault("plugin-prefill-room", "a graph of an extend gets back fewer heads than it has room for",
      "return padded, *statistics", "return out, *statistics")
fault("plugin-prefill-left", "ours is asked again for the prefill of V3.2 that it has left",
      "if _unpadded.left:", "if False:")
fault("plugin-prefill-lengths", "lengths of other rows are taken", "and len(topk_length) == len(q_all)", "")
fault("plugin-warm-up", "prefill of all ranks' heads is prepared", " // module.get_parallel().attn_tp_size", "")
fault = of("interop/sparse_mla_torch/plugins/sglang_v41.py", "tests/torch_face/test_sglang_v41.py")
fault("plugin-v41-order", "SGLang's V4.1 caches are read in the other order of bytes",
      'get("use_legacy", True)', 'get("use_legacy", False) is False')
fault("plugin-v41-no-rope", "V3.2's rows without rope are taken for V4.1's",
      'or isinstance(arguments["tile_scheduler_metadata"], torch.Tensor)', "")
fault = of("interop/sparse_mla_torch/plugins/vllm_v41.py", "tests/torch_face/test_vllm_v41.py")
fault("plugin-v41-tie", "vLLM's FP4 writer: a tie goes to the odd code", "size > 2.5", "size >= 2.5")
fault = of("interop/sparse_mla_torch/plugins/short_prefill.py", "tests/torch_face/test_short_prefill.py")
fault("short-prefill-override", "a backend that is named for prefill is not asked",
      'override_of("prefill") is not None or ', "")
fault = of("interop/sparse_mla_torch/transformers/v4.py", "tests/torch_face/test_transformers.py")
fault("use-sink", "transformers' V4 attends without its sink",
      "self.scaling, seen, self.sinks.float())", "self.scaling, seen)")
fault("use-window", "transformers' V4: the window has a token more",
      "torch.arange(self.sliding_window, device", "torch.arange(self.sliding_window + 1, device")
fault("use-window-start", "transformers' V4: a chunk's window begins at the first token that the cache keeps, too late",
      "valid = (token >= first)", "valid = (token > first)")
fault("use-overlap", "transformers' V4: an entry takes the window before it from the same window",
      "x[:, :-1, :, :dim]), 1)", "x[:, 1:, :, :dim]), 1)")
fault("use-one-query", "transformers' V4: one query sees the entries of its position",
      "sees_all = num_rows == 1 and", "sees_all = False and")
fault = of("interop/sparse_mla_torch/transformers/select.py", "tests/torch_face/test_transformers.py")
fault("use-padding", "padding is selected",
      "logits[..., : tokens.shape[1]].masked_fill_(~tokens[:, None], -torch.inf)", "pass")
fault("use-future", "a query attends to the token behind it",
      "(indices >= 0) & (indices < lengths[..., None])", "(indices >= 0) & (indices <= lengths[..., None])")
fault("use-batch", "rows of a batch attend to the first one's keys",
      "torch.where(indices < 0, -1, indices + first)\n    tensors", "indices\n    tensors")
fault = of("interop/sparse_mla_torch/transformers/dsa.py", "tests/torch_face/test_transformers.py")
fault("use-all-entries", "all entries are attended to, whatever is selected",
      "        if count <= indexer.index_topk:\n", "        if True:\n")
fault("use-past", "a chunk forgets the tokens before it",
      "start, stop = block.start + 1 + seen.past, block.stop + 1 + seen.past",
      "start, stop = block.start + 1, block.stop + 1")
fault("use-rotary", "a block's queries turn as the first block's do",
      "of_block = table[:, block]", "of_block = table[:, : block.stop - block.start]")
fault("use-shared", "GLM-5: a layer that shares attends to the first block's selection", "shared[:, block]",
      "shared[:, : block.stop - block.start]")
fault = of("jax_sparse_mla/serving/mesh.py", "tests/serving/test_selected.py")
fault("mesh-kinds", "over a mesh, only the latest kind of step is known to have had its turn",
      "self._kinds = [kind for kind in self._kinds if kind != served] + [served]", "self._kinds = [served]")
fault = of("jax_sparse_mla/serving/step.py", "tests/serving/test_selected.py")
fault("replay-behind", "a round of drafts keeps tokens behind the last one that is replayed",
      "    if program.replays:  # a row whose", "    if False:  # a row whose")
fault("replay-drafts", "a verifying step selects although positions are given",
      "    if not (program.replays or program.return_selected):", "    if not program.return_selected:")
fault = of("interop/sparse_mla_torch/layers.py", "tests/torch_face/test_torch_layers.py")
fault("torch-layer-weights", "torch's V3.2 layer: index weights go without the queries' scale",
      "rows.index_weights * scale,", "rows.index_weights,")
