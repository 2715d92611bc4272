# SPDX-License-Identifier: Apache-2.0
"""The work of a layer: seconds of its products, attention, passes over memory, and messages.

[Note: passes] Bytes that a token's operations read and write in bf16, for each element of their
width, forward and backward. h is the hidden size, f the width of an MLP, q, k and v those of
queries, keys and values. Fused kernels read their inputs and write their results once. Operations
of torch one by one write all between: RMSNorm in fp32 is 8 operations, rotary positions 6.

    norm               4 h, 8 h         eager RMSNorm 36 h, 60 h; its backward adds the residual's
    residual           6 h, 6 h         compiled: within the norm, 4 h each
    rotary             4 (q + k) twice  eager 28 (q + k)
    heads              4 (q + k + v + o)  each time that they are copied to another layout
    gated activation   6 f, 10 f        eager 10 f, 16 f
    activation         4 f, 6 f
    tokens to experts  16 k h twice     sorted by expert before and after each of two exchanges
    FP8                4 an element     of inputs, weights and gradients: read, written twice
    scores             9, 12            without fused attention: softmax and dropout
    loss               of the software  one by one 36: casts, softmax, and their gradients

[Note: messages of a layer] Tensor parallelism gathers and scatters activations twice forward and
backward, each as large as all of its ranks' activations. Where messages overlap with the products
that need them, they are cut into as many parts as there are ranks: the longer one of both counts,
and a part of the shorter one. Keys and values travel between context ranks while attention
computes. Tokens are exchanged between expert ranks twice in each direction. Where that is done
while another microbatch computes, both are cut in two.

[Note: the host] The host launches operations one after the other, and the GPU waits for it where
they are short: a layer takes as long as the slower one of both.
"""

from __future__ import annotations

from megatron.planning.costs.gpu_kernels import FITTED, Fitted, Kernels
from megatron.planning.costs.layer_memory import NONE
from megatron.planning.costs.model_sizes import ModelSizes, RunLayout
from megatron.planning.costs.software import COMPILED, EAGER, FUSED, UNFUSED, Software
from megatron.planning.costs.spent_seconds import LayerSeconds, Spent
from megatron.planning.machine import Cluster

BF16 = 2
"""Bytes of an element of bf16."""

CALLS = {EAGER: 50, FUSED: 50, COMPILED: 18}
"""Operations that the host launches for the forward of a dense layer: counted in Llama's of
torchtitan, in that of Megatron-Core with Transformer Engine, whose modules cost more each, and in
the code that a compiler makes of the former."""

EXCHANGE = 0.7
"""Part of the bandwidth of links that an exchange of tokens reaches, beside ``link_efficiency``:
NCCL's all-to-all has messages of its own to each rank."""

MERGED = {EAGER: 40, FUSED: 12, COMPILED: 40}
"""Bytes for each element of attention's result that a step of ring attention reads and writes to
merge it into the sum in fp32: one kernel of Transformer Engine, and torch's, one by one."""

CALLS_OF_UNIT = 20
"""Operations of the hooks, copies and collectives of a unit of FSDP."""

CALLS_OF_OUTPUT = 30
"""Operations of the last norm, the output layer and the loss; an estimate."""

CALLS_IN_GRAPHS = 0.3
"""Part of the calls that remains where layers are CUDA graphs."""


class LayerWork:
    """The seconds of the layers of a model.

    Args:
        sizes: of the model.
        mesh: the layout of the run.
        machine: on which it runs.
        software: of the run.
        fitted: constants of the model of time.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        mesh: RunLayout,
        machine: Cluster,
        software: Software,
        fitted: Fitted = FITTED,
    ):
        self._sizes = sizes
        self._mesh = mesh
        self._machine = machine
        self._software = software
        self._fitted = fitted
        self._kernels = Kernels(machine, software, fitted)
        self._tokens = mesh.micro_batch * sizes.sequence / mesh.context
        self._own_tokens = self._tokens / (mesh.tensor if mesh.is_sequence_parallel else 1)

    # ---- products

    def _products(self, m: float, n: float, k: float, count: float = 1) -> Spent:
        """Return the seconds of a product forward, and of its two products backward.

        Args:
            m: tokens.
            n: width of the result.
            k: width of the input.
            count: products of this shape, for as many experts.
        """
        product = self._kernels.product
        is_fp8 = self._software.uses_fp8
        spent = Spent(
            product(m, n, k, count, is_fp8),
            product(m, k, n, count, is_fp8) + product(n, k, m, count, is_fp8),
        )
        if is_fp8:
            spent.forward += self._kernels.move(4 * count * (m * k + n * k))
            spent.backward += self._kernels.move(4 * count * m * n)
        return spent

    def _weights(self, num_elements: float) -> Spent:
        """Return the seconds of what is done with weights and their gradients, beside products."""
        software = self._software
        if self._mesh.is_fsdp:  # copied out of flat buffers; gradients are cast and copied into one
            copied = 2 * software.compute_bytes
            cast = software.compute_bytes + 2 * software.reduce_bytes
            return Spent(
                self._kernels.move(copied * num_elements),
                self._kernels.move((copied + cast) * num_elements),
            )
        added = 2 * software.gradient_bytes
        if software.fusion != FUSED:
            added += 2 * software.compute_bytes  # it is written before it is added
        return Spent(0.0, self._kernels.move(added * num_elements))

    def _attention_products(self) -> Spent:
        sizes, tensor = self._sizes, self._mesh.tensor
        tokens, hidden = self._tokens, sizes.hidden
        spent = Spent()
        latent = sizes.latent
        if latent is None:
            width = sizes.query_width + sizes.key_width + sizes.value_width
            spent.add(self._products(tokens, width / tensor, hidden))
        else:
            spent.add(self._products(self._own_tokens, latent.key_rank + latent.rotary, hidden))
            query_in = hidden
            if latent.query_rank:
                spent.add(self._products(self._own_tokens, latent.query_rank, hidden))
                query_in = latent.query_rank
            spent.add(self._products(tokens, sizes.query_width / tensor, query_in))
            width = sizes.heads * (latent.head + latent.value)
            spent.add(self._products(tokens, width / tensor, latent.key_rank))
        spent.add(self._products(tokens, hidden, sizes.output_width / tensor))
        spent.add(self._weights(sizes.attention_weights / tensor))
        return spent

    def _mlp(self, tokens: float, width: float, count: float = 1) -> tuple[Spent, float]:
        """Return the seconds of an MLP's products, and of the first one's forward alone."""
        sizes = self._sizes
        first = self._products(tokens, (2 if sizes.is_gated else 1) * width, sizes.hidden, count)
        spent = Spent(first.forward, first.backward)
        spent.add(self._products(tokens, sizes.hidden, width, count))
        num_matrices = 3 if sizes.is_gated else 2
        spent.add(self._weights(num_matrices * width * sizes.hidden * count))
        return spent, first.forward

    # ---- attention

    def _attention(self, window: int) -> Spent:
        """Return the seconds of the core of attention.

        Args:
            window: tokens that a query sees at most; 0: all before it.
        """
        sizes, mesh = self._sizes, self._mesh
        queries = sizes.sequence / mesh.context
        keys = sizes.sequence / 2
        if window:
            keys = min(keys, window)
        width = (sizes.query_width + sizes.output_width) / mesh.tensor
        head = width * mesh.tensor / sizes.heads / 2
        if self._software.attention != UNFUSED:
            found = self._kernels.attention(mesh.micro_batch, queries, keys, width, int(head))
            spent = Spent(*found)
            if mesh.context > 1:
                merged = mesh.context * MERGED[self._software.fusion] * self._tokens
                merging = self._pass(merged * sizes.output_width / mesh.tensor)
                spent.add(Spent(merging, merging))
            return spent
        count = mesh.micro_batch * sizes.heads / mesh.tensor
        scores = self._kernels.product(queries, sizes.sequence, head, count)
        values = self._kernels.product(queries, head, sizes.sequence, count)
        num_scores = count * queries * sizes.sequence
        return Spent(
            scores + values + self._pass(9 * num_scores),
            2 * (scores + values) + self._pass(12 * num_scores),
        )

    # ---- passes over memory; see [Note: passes]

    def _pass(self, num_bytes: float) -> float:
        """Return the seconds of a pass over memory.

        Args:
            num_bytes: that it reads and writes in bf16.
        """
        return self._kernels.move(num_bytes * self._software.compute_bytes / BF16)

    def _attention_passes(self) -> Spent:
        sizes, software = self._sizes, self._software
        tokens, tensor = self._tokens, self._mesh.tensor
        queries_and_keys = sizes.query_width + sizes.key_width
        copied = 4.0 * (queries_and_keys + sizes.value_width + sizes.output_width)
        copied *= software.copies_of_heads
        rotary = 4.0 * queries_and_keys if sizes.is_rotary else 0.0
        if software.fusion == EAGER:
            rotary *= 7
        num_bytes = tokens / tensor * (copied + rotary)
        spent = Spent(self._pass(num_bytes), self._pass(num_bytes))
        if sizes.has_query_norm:
            inner = tokens / tensor * queries_and_keys
            spent.add(Spent(self._pass(4 * inner), self._pass(8 * inner)))
        return spent

    def _norm_passes(self, num_norms: float = 2) -> Spent:
        """Return the seconds of norms with the residuals behind them."""
        software = self._software
        elements = self._own_tokens * self._sizes.hidden
        forward, backward = 4, 8
        if software.fusion == EAGER and self._sizes.is_rms and not software.has_fused_norm:
            forward, backward = 36, 60
        residual = 4 if software.fusion == COMPILED else 6
        return Spent(
            self._pass(num_norms * elements * (forward + residual)),
            self._pass(num_norms * elements * (backward + residual)),
        )

    def _activation_passes(self, tokens: float, width: float) -> Spent:
        forward, backward = (6, 10) if self._sizes.is_gated else (4, 6)
        if self._software.fusion == EAGER and self._sizes.is_gated:
            forward, backward = 10, 16
        return Spent(
            self._pass(forward * tokens * width),
            self._pass(backward * tokens * width),
        )

    # ---- messages; see [Note: messages of a layer]

    def _tensor_messages(self, products: Spent, num_pairs: int) -> Spent:
        """Return the seconds of tensor-parallel messages that nothing overlaps.

        Args:
            products: of the parts of the layer that tensor ranks divide.
            num_pairs: a gather and a scatter each, forward.
        """
        mesh = self._mesh
        if mesh.tensor == 1:
            return Spent()
        num_bytes = self._software.compute_bytes * self._tokens * self._sizes.hidden
        message = self._machine.collective_seconds("all_gather", num_bytes, mesh.tensor_ranks)
        message /= self._fitted.link
        num_messages = 2 * num_pairs
        if not self._software.overlaps_tensor:
            return Spent(num_messages * message, num_messages * message)
        spent = Spent()
        spent.forward = num_messages * self._rest(
            message, products.forward / num_messages, mesh.tensor
        )
        half = products.backward / num_messages / 2  # the other products need no message
        spent.backward = num_messages * self._rest(message, half, mesh.tensor)
        return spent

    def _context_messages(self, attention: Spent) -> Spent:
        mesh = self._mesh
        if mesh.context == 1:
            return Spent()
        width = (self._sizes.key_width + self._sizes.value_width) / mesh.tensor
        num_bytes = self._software.compute_bytes * mesh.micro_batch * self._sizes.sequence * width
        message = self._machine.collective_seconds("all_gather", num_bytes, mesh.context_ranks)
        message /= self._fitted.link
        return Spent(
            self._rest(message, attention.forward, mesh.context),
            self._rest(2 * message, attention.backward, mesh.context),
        )

    def _exchange(self) -> float:
        """Return the seconds of one exchange of tokens between expert ranks."""
        mesh, experts = self._mesh, self._sizes.experts
        assert experts is not None
        num_bytes = self._software.compute_bytes * self._own_tokens * self._sizes.hidden
        num_bytes *= experts.top_k
        num_bytes *= self._software.imbalance
        copies = experts.top_k if self._software.deduplicates_tokens else 0
        seconds = self._machine.exchange_seconds(num_bytes, mesh.expert_ranks, copies)
        # DeepEP's published bandwidth between nodes is that of the link.
        return seconds if copies else seconds / EXCHANGE

    # ---- layers

    def of_layer(self, has_experts: bool, window: int = 0) -> LayerSeconds:
        """Return the seconds of a layer.

        Args:
            has_experts: its MLP is experts.
            window: tokens that a query sees at most; 0: all before it.
        """
        sizes, mesh = self._sizes, self._mesh
        products = self._attention_products()
        attention = self._attention(window)
        passes = self._norm_passes()
        passes.add(self._attention_passes())
        messages = Spent()
        calls: float = CALLS[self._software.fusion]
        if has_experts:
            calls += self._fitted.expert_calls
            messages.add(self._tensor_messages(products, 1))
            mlp, first, exchanges = self._experts(passes)
            busy = Spent(products.forward + mlp.forward, products.backward + mlp.backward)
            busy.add(attention)
            busy.add(passes)
            messages.add(self._exchanges_beside(exchanges, busy))
        else:
            mlp, first = self._mlp(self._tokens, sizes.ffn / mesh.tensor)
            passes.add(self._activation_passes(self._tokens, sizes.ffn / mesh.tensor))
            together = Spent(products.forward + mlp.forward, products.backward + mlp.backward)
            messages.add(self._tensor_messages(together, 2))
        products.add(mlp)
        messages.add(self._context_messages(attention))
        if mesh.is_fsdp:
            calls += CALLS_OF_UNIT
        if self._software.uses_graphs:
            calls *= CALLS_IN_GRAPHS
        host = calls * self._fitted.launch / self._machine.host_speed
        return LayerSeconds(products, attention, passes, messages, Spent(host, host), first)

    def _exchanges_beside(self, exchanges: float, busy: Spent) -> Spent:
        """Return what the exchanges of tokens add to a layer.

        Args:
            exchanges: seconds of those of a forward, and of a backward.
            busy: compute of the layer. Where another microbatch computes meanwhile, the forward of
                one lies beside the backward of the other.
        """
        if not self._software.overlaps_exchange:
            return Spent(exchanges, exchanges)
        added = self._rest(2 * exchanges, busy.forward + busy.backward, 2) / 2
        return Spent(added, added)

    def _experts(self, passes: Spent) -> tuple[Spent, float, float]:
        """Return the seconds of experts' products and of exchanges, and add their passes."""
        sizes, mesh = self._sizes, self._mesh
        experts = sizes.experts
        assert experts is not None
        local = experts.number / mesh.expert
        routed = self._own_tokens * experts.top_k * self._software.imbalance * mesh.expert_tensor
        width = experts.width / mesh.expert_tensor
        spent, first = self._mlp(routed / local, width, local)
        passes.add(self._activation_passes(routed, width))
        if experts.shared_width:
            shared = experts.shared_width / mesh.tensor
            more, _ = self._mlp(self._tokens, shared)
            spent.add(more)
            passes.add(self._activation_passes(self._tokens, shared))
        spent.add(self._products(self._own_tokens, experts.number, sizes.hidden))
        sorting = 16 * routed * sizes.hidden
        scores = 80 * self._own_tokens * experts.number
        passing = self._pass(sorting + scores)
        passes.add(Spent(passing, passing))
        exchanges = 2 * self._exchange()
        if mesh.expert_tensor > 1:
            num_bytes = self._software.compute_bytes * routed * sizes.hidden
            ranks = range(mesh.expert_tensor)
            gathered = self._machine.collective_seconds("all_reduce", num_bytes, ranks)
            exchanges += gathered / self._fitted.link
        return spent, first, exchanges

    def forward_and_backward(
        self, has_experts: bool, recompute: str = NONE, part: float = 1.0
    ) -> tuple[float, float]:
        """Return the seconds of a layer forward and backward, with its messages.

        Where half of the layers have a window, they are the mean of both kinds.

        Args:
            has_experts: its MLP is experts.
            recompute: what the backward computes again; see ``layer_memory.py``.
            part: of the layers that are recomputed, if they are whole layers.
        """
        seconds = self.of_layer(has_experts)
        found = seconds.forward, seconds.backward(seconds.again(recompute, part))
        if not self._sizes.window:
            return found
        seconds = self.of_layer(has_experts, self._sizes.window)
        narrow = seconds.forward, seconds.backward(seconds.again(recompute, part))
        return (found[0] + narrow[0]) / 2, (found[1] + narrow[1]) / 2

    def of_output(self) -> LayerSeconds:
        """Return the seconds of the last norm, the output layer and the loss."""
        sizes, mesh = self._sizes, self._mesh
        width = sizes.vocabulary / mesh.tensor
        kernels = self._kernels
        products = Spent(
            kernels.product(self._tokens, width, sizes.hidden),
            kernels.product(self._tokens, sizes.hidden, width)
            + kernels.product(width, sizes.hidden, self._tokens),
        )
        products.add(self._weights(width * sizes.hidden))
        logits = self._tokens * width
        loss = kernels.move(self._software.loss_bytes / 2 * logits)
        passes = self._norm_passes(1)
        passes.add(Spent(loss, loss))
        message = 0.0
        if mesh.tensor > 1:
            num_bytes = self._software.compute_bytes * self._tokens * sizes.hidden
            message = self._machine.collective_seconds("all_gather", num_bytes, mesh.tensor_ranks)
            message /= self._fitted.link
        host = CALLS_OF_OUTPUT * self._fitted.launch / self._machine.host_speed
        messages = Spent(message, message)
        return LayerSeconds(products, Spent(), passes, messages, Spent(host, host), 0.0)

    def _rest(self, message: float, compute: float, num_parts: int) -> float:
        """Return what a message adds to the compute beside it; see [Note: messages of a layer].

        Args:
            message: its seconds.
            compute: seconds of what does not need all of it.
            num_parts: into which both are cut.
        """
        lost = self._fitted.contention * min(message, compute)
        return max(message, compute) + min(message, compute) / num_parts - compute + lost
