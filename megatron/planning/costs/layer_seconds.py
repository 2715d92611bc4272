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
    router             80 for each token and expert, in each direction

These are counted by the operands of each operation, and have no other source; the router's are an
estimate.

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
from megatron.planning.costs.message_seconds import collective_seconds
from megatron.planning.costs.model_sizes import (
    ExpertSizes,
    LatentSizes,
    ModelSizes,
    RunLayout,
)
from megatron.planning.costs.software import COMPILED, EAGER, FUSED, UNFUSED, Software
from megatron.planning.costs.spent_seconds import LayerSeconds, Spent
from megatron.planning.machine import Cluster

BF16 = 2
"""Bytes of an element of bf16."""

BYTES_OF_CAST = 4
"""Bytes of a cast to FP8 for each element of bf16: it is read, and written twice."""

CALLS = {EAGER: 50, FUSED: 50, COMPILED: 18}
"""Operations that the host launches for the forward of a dense layer: counted in Llama's of
torchtitan, in that of Megatron-Core with Transformer Engine, whose modules cost more each, and in
the code that a compiler makes of the former."""

EXCHANGE = 0.7
"""Part of the bandwidth of links that an exchange of tokens reaches, besides ``link_efficiency``:
NCCL's all-to-all has messages of its own to each rank. An estimate."""

MERGED = {EAGER: 40, FUSED: 12, COMPILED: 40}
"""Bytes for each element of attention's result that a step of ring attention reads and writes to
merge it into the sum in fp32: one kernel of Transformer Engine, and torch's, one by one. Counted by
their operands, an estimate."""

CALLS_OF_UNIT = 20
"""Operations of the hooks, copies and collectives of a unit of FSDP; an estimate."""

CALLS_OF_OUTPUT = 30
"""Operations of the last norm, the output layer and the loss; an estimate."""

CALLS_IN_GRAPHS = 0.3
"""Part of the calls that remains where layers are CUDA graphs; an estimate."""


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
        self._element = software.compute_bytes
        self._tokens = mesh.micro_batch * sizes.sequence / mesh.context
        self._own_tokens = self._tokens
        if mesh.is_sequence_parallel:
            self._own_tokens /= mesh.tensor
        self._is_eager = software.fusion == EAGER

    # ---- products

    def _products(
        self,
        m: float,
        n: float,
        k: float,
        count: float = 1,
    ) -> Spent:
        """Return the seconds of a product forward, and of its two products backward.

        Args:
            m: tokens.
            n: width of the result.
            k: width of the input.
            count: products of this shape, for as many experts.
        """
        is_fp8 = self._software.uses_fp8
        forward = self._kernels.product(m, n, k, count, is_fp8)
        of_input = self._kernels.product(m, k, n, count, is_fp8)
        of_weight = self._kernels.product(n, k, m, count, is_fp8)
        spent = Spent(forward, of_input + of_weight)
        if is_fp8:
            operands = count * (m * k + n * k)
            results = count * m * n
            spent.forward += self._kernels.move(BYTES_OF_CAST * operands)
            spent.backward += self._kernels.move(BYTES_OF_CAST * results)
        return spent

    def _weights(self, num_elements: float) -> Spent:
        """Return the seconds of what is done with weights and their gradients, without products."""
        software = self._software
        if self._mesh.is_fsdp:
            # Weights are copied out of flat buffers, gradients are cast and copied into one.
            copied = 2 * self._element
            cast = self._element + 2 * software.reduce_bytes
            forward = self._kernels.move(copied * num_elements)
            backward = self._kernels.move((copied + cast) * num_elements)
            return Spent(forward, backward)
        added = 2 * software.gradient_bytes
        if software.fusion != FUSED:
            added += 2 * self._element  # it is written before it is added
        backward = self._kernels.move(added * num_elements)
        return Spent(0.0, backward)

    def _attention_products(self) -> Spent:
        sizes = self._sizes
        tensor = self._mesh.tensor
        spent = Spent()
        if sizes.latent is None:
            width = sizes.query_width + sizes.key_width + sizes.value_width
            spent.add(self._products(self._tokens, width / tensor, sizes.hidden))
        else:
            spent.add(self._latent_products(sizes.latent))
        output_width = sizes.output_width / tensor
        spent.add(self._products(self._tokens, sizes.hidden, output_width))
        spent.add(self._weights(sizes.attention_weights / tensor))
        return spent

    def _latent_products(self, latent: LatentSizes) -> Spent:
        """Return the seconds of the products that make queries, keys and values of latents."""
        sizes = self._sizes
        tensor = self._mesh.tensor
        spent = Spent()
        key_rank = latent.key_rank + latent.rotary
        spent.add(self._products(self._own_tokens, key_rank, sizes.hidden))
        query_in = sizes.hidden
        if latent.query_rank:
            query_in = latent.query_rank
            spent.add(self._products(self._own_tokens, query_in, sizes.hidden))
        query_width = sizes.query_width / tensor
        spent.add(self._products(self._tokens, query_width, query_in))
        width = sizes.heads * (latent.head + latent.value)
        spent.add(self._products(self._tokens, width / tensor, latent.key_rank))
        return spent

    def _mlp(
        self,
        tokens: float,
        width: float,
        count: float = 1,
    ) -> tuple[Spent, float]:
        """Return the seconds of an MLP's products, and of the first one's forward alone."""
        hidden = self._sizes.hidden
        num_matrices = self._sizes.num_matrices
        first_width = (num_matrices - 1) * width
        first = self._products(tokens, first_width, hidden, count)
        spent = Spent()
        spent.add(first)
        spent.add(self._products(tokens, hidden, width, count))
        spent.add(self._weights(num_matrices * width * hidden * count))
        return spent, first.forward

    # ---- attention

    def _attention(self, window: int) -> Spent:
        """Return the seconds of the core of attention.

        Args:
            window: tokens that a query sees at most; 0: all before it.
        """
        if self._software.attention == UNFUSED:
            return self._unfused_attention()
        sizes = self._sizes
        mesh = self._mesh
        keys = sizes.sequence / 2
        if window:
            keys = min(keys, window)
        width = sizes.query_width + sizes.output_width
        forward, backward = self._kernels.attention(
            sequences=mesh.micro_batch,
            queries=sizes.sequence / mesh.context,
            keys=keys,
            width=width / mesh.tensor,
            head=int(width / sizes.heads / 2),
        )
        spent = Spent(forward, backward)
        if mesh.context > 1:
            elements = self._tokens * sizes.output_width / mesh.tensor
            num_bytes = mesh.context * MERGED[self._software.fusion] * elements
            merging = self._pass(num_bytes)
            spent.add(Spent(merging, merging))
        return spent

    def _unfused_attention(self) -> Spent:
        """Return the seconds of two batched products with scores in memory between them."""
        sizes = self._sizes
        mesh = self._mesh
        queries = sizes.sequence / mesh.context
        head = (sizes.query_width + sizes.output_width) / sizes.heads / 2
        count = mesh.micro_batch * sizes.heads / mesh.tensor
        scores = self._kernels.product(queries, sizes.sequence, head, count)
        values = self._kernels.product(queries, head, sizes.sequence, count)
        num_scores = count * queries * sizes.sequence
        products = scores + values
        forward = products + self._pass(9 * num_scores)
        backward = 2 * products + self._pass(12 * num_scores)
        return Spent(forward, backward)

    # ---- passes over memory; see [Note: passes]

    def _pass(self, num_bytes: float) -> float:
        """Return the seconds of a pass over memory.

        Args:
            num_bytes: that it reads and writes in bf16.
        """
        return self._kernels.move(num_bytes * self._element / BF16)

    def _passes(
        self,
        elements: float,
        forward: float,
        backward: float,
    ) -> Spent:
        """Return the seconds of passes over elements.

        Args:
            elements: that are read and written.
            forward: bytes for each in the forward, in bf16.
            backward: bytes for each in the backward.
        """
        seconds_forward = self._pass(forward * elements)
        seconds_backward = self._pass(backward * elements)
        return Spent(seconds_forward, seconds_backward)

    def _attention_passes(self) -> Spent:
        sizes = self._sizes
        tokens = self._tokens / self._mesh.tensor
        rotated = sizes.query_width + sizes.key_width
        every = rotated + sizes.value_width + sizes.output_width
        num_bytes = 4.0 * every * self._software.copies_of_heads
        if sizes.is_rotary:
            of_rotary = 28.0 if self._is_eager else 4.0
            num_bytes += of_rotary * rotated
        spent = self._passes(tokens, num_bytes, num_bytes)
        if sizes.has_query_norm:
            spent.add(self._passes(tokens * rotated, 4, 8))
        return spent

    def _norm_passes(self, num_norms: float = 2) -> Spent:
        """Return the seconds of norms with the residuals behind them."""
        software = self._software
        forward = 4
        backward = 8
        if self._is_eager and self._sizes.is_rms and not software.has_fused_norm:
            forward = 36
            backward = 60
        residual = 6
        if software.fusion == COMPILED:
            residual = 4
        elements = num_norms * self._own_tokens * self._sizes.hidden
        return self._passes(elements, forward + residual, backward + residual)

    def _activation_passes(self, tokens: float, width: float) -> Spent:
        elements = tokens * width
        if not self._sizes.is_gated:
            return self._passes(elements, 4, 6)
        if self._is_eager:
            return self._passes(elements, 10, 16)
        return self._passes(elements, 6, 10)

    # ---- messages; see [Note: messages of a layer]

    def _gather(self, elements: float, ranks: range) -> float:
        """Return the seconds in which ranks gather, or scatter, elements of the compute dtype."""
        num_bytes = self._element * elements
        return collective_seconds(self._machine, "all_gather", num_bytes, ranks, self._fitted)

    def _tensor_messages(self, products: Spent, num_pairs: int) -> Spent:
        """Return the seconds of tensor-parallel messages that nothing overlaps.

        Args:
            products: of the parts of the layer that tensor ranks divide.
            num_pairs: a gather and a scatter each, forward.
        """
        mesh = self._mesh
        if mesh.tensor == 1:
            return Spent()
        message = self._gather(self._tokens * self._sizes.hidden, mesh.tensor_ranks)
        num_messages = 2 * num_pairs
        if not self._software.overlaps_tensor:
            return Spent(num_messages * message, num_messages * message)
        beside_forward = products.forward / num_messages
        beside_backward = products.backward / num_messages / 2  # the rest needs no message
        forward = self._rest(message, beside_forward, mesh.tensor)
        backward = self._rest(message, beside_backward, mesh.tensor)
        return Spent(num_messages * forward, num_messages * backward)

    def _context_messages(self, attention: Spent) -> Spent:
        sizes = self._sizes
        mesh = self._mesh
        if mesh.context == 1:
            return Spent()
        width = (sizes.key_width + sizes.value_width) / mesh.tensor
        elements = mesh.micro_batch * sizes.sequence * width
        message = self._gather(elements, mesh.context_ranks)
        forward = self._rest(message, attention.forward, mesh.context)
        backward = self._rest(2 * message, attention.backward, mesh.context)
        return Spent(forward, backward)

    def _exchange(self, experts: ExpertSizes) -> float:
        """Return the seconds of one exchange of tokens between expert ranks."""
        software = self._software
        sent = self._own_tokens * experts.top_k * software.imbalance
        num_bytes = self._element * sent * self._sizes.hidden
        ranks = self._mesh.expert_ranks
        if software.deduplicates_tokens:
            # DeepEP's published bandwidth between nodes is that of the link.
            return self._machine.exchange_seconds(num_bytes, ranks, experts.top_k)
        return self._machine.exchange_seconds(num_bytes, ranks) / EXCHANGE

    # ---- layers

    def of_layer(self, has_experts: bool, window: int = 0) -> LayerSeconds:
        """Return the seconds of a layer.

        Args:
            has_experts: its MLP is experts.
            window: tokens that a query sees at most; 0: all before it.
        """
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
            products.add(mlp)
            busy = Spent()
            for part in (products, attention, passes):
                busy.add(part)
            messages.add(self._exchanges_beside(exchanges, busy))
        else:
            width = self._sizes.ffn / self._mesh.tensor
            mlp, first = self._mlp(self._tokens, width)
            passes.add(self._activation_passes(self._tokens, width))
            products.add(mlp)
            messages.add(self._tensor_messages(products, 2))
        messages.add(self._context_messages(attention))
        if self._mesh.is_fsdp:
            calls += CALLS_OF_UNIT
        if self._software.uses_graphs:
            calls *= CALLS_IN_GRAPHS
        return LayerSeconds(
            products=products,
            attention=attention,
            passes=passes,
            messages=messages,
            host=self._launched(calls),
            mlp_products=first,
        )

    def _launched(self, calls: float) -> Spent:
        """Return the seconds in which the host launches so many operations, in either pass."""
        seconds = calls * self._fitted.launch / self._machine.host_speed
        return Spent(seconds, seconds)

    def _exchanges_beside(self, exchanges: float, busy: Spent) -> Spent:
        """Return what the exchanges of tokens add to a layer.

        Args:
            exchanges: seconds of those of a forward, and of a backward.
            busy: compute of the layer. Where another microbatch computes meanwhile, the forward of
                one overlaps with the backward of the other.
        """
        if not self._software.overlaps_exchange:
            return Spent(exchanges, exchanges)
        computing = busy.forward + busy.backward
        added = self._rest(2 * exchanges, computing, 2) / 2
        return Spent(added, added)

    def _experts(self, passes: Spent) -> tuple[Spent, float, float]:
        """Return the seconds of experts' products and of exchanges, and add their passes."""
        sizes = self._sizes
        mesh = self._mesh
        experts = sizes.experts
        assert experts is not None
        local = experts.number / mesh.expert
        sent = self._own_tokens * experts.top_k * self._software.imbalance
        routed = sent * mesh.expert_tensor
        width = experts.width / mesh.expert_tensor
        spent, first = self._mlp(routed / local, width, local)
        passes.add(self._activation_passes(routed, width))
        if experts.shared_width:
            shared_width = experts.shared_width / mesh.tensor
            shared, _ = self._mlp(self._tokens, shared_width)
            spent.add(shared)
            passes.add(self._activation_passes(self._tokens, shared_width))
        spent.add(self._products(self._own_tokens, experts.number, sizes.hidden))
        sorting = 16 * routed * sizes.hidden
        scores = 80 * self._own_tokens * experts.number
        passing = self._pass(sorting + scores)
        passes.add(Spent(passing, passing))
        exchanges = 2 * self._exchange(experts)
        if mesh.expert_tensor > 1:
            ranks = range(mesh.expert_tensor)
            exchanges += 2 * self._gather(routed * sizes.hidden, ranks)
        return spent, first, exchanges

    def forward_and_backward(
        self,
        has_experts: bool,
        recompute: str = NONE,
        part: float = 1.0,
    ) -> tuple[float, float]:
        """Return the seconds of a layer forward and backward, with its messages.

        Where half of the layers have a window, they are the mean of both kinds.

        Args:
            has_experts: its MLP is experts.
            recompute: what the backward computes again; see ``layer_memory.py``.
            part: of the layers that are recomputed, if they are whole layers.
        """
        whole = self.of_layer(has_experts)
        forward = whole.forward
        backward = whole.backward(whole.again(recompute, part))
        window = self._sizes.window
        if not window:
            return forward, backward
        narrow = self.of_layer(has_experts, window)
        forward += narrow.forward
        backward += narrow.backward(narrow.again(recompute, part))
        return forward / 2, backward / 2

    def of_output(self) -> LayerSeconds:
        """Return the seconds of the last norm, the output layer and the loss."""
        sizes = self._sizes
        mesh = self._mesh
        width = sizes.vocabulary / mesh.tensor
        product = self._kernels.product
        products = Spent()
        products.forward = product(self._tokens, width, sizes.hidden)
        products.backward = product(self._tokens, sizes.hidden, width)
        products.backward += product(width, sizes.hidden, self._tokens)
        products.add(self._weights(width * sizes.hidden))
        logits = self._tokens * width
        loss = self._kernels.move(self._software.loss_bytes / 2 * logits)
        passes = self._norm_passes(1)
        passes.add(Spent(loss, loss))
        message = 0.0
        if mesh.tensor > 1:
            message = self._gather(self._tokens * sizes.hidden, mesh.tensor_ranks)
        return LayerSeconds(
            products=products,
            attention=Spent(),
            passes=passes,
            messages=Spent(message, message),
            host=self._launched(CALLS_OF_OUTPUT),
            mlp_products=0.0,
        )

    def _rest(
        self,
        message: float,
        compute: float,
        num_parts: int,
    ) -> float:
        """Return what a message adds to simultaneous compute; see [Note: messages of a layer].

        Args:
            message: its seconds.
            compute: seconds of what does not need all of it.
            num_parts: into which both are cut.
        """
        longer = max(message, compute)
        shorter = min(message, compute)
        lost = self._fitted.contention * shorter
        return longer + shorter / num_parts + lost - compute
