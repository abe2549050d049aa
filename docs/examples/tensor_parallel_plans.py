"""Plans for ``FSDP2Strategy(tp_plan=…)`` for models of transformers, also for those that bring none."""

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel


def of_vocabulary(embedding, head):
    """The embedding and the head, also where they are one parameter: each rank has a part of the vocabulary."""
    whole_in, whole_out = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())
    return {embedding: whole_in, head: whole_out}


def of_attention(at, query="q_proj", key="k_proj", value="v_proj", output="o_proj"):
    """Attention: each rank has some of the heads."""
    divided = {f"{at}.{name}": ColwiseParallel() for name in (query, key, value)}
    return {**divided, f"{at}.{output}": RowwiseParallel()}


def llama():
    mlp = {f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    mlp["model.layers.*.mlp.down_proj"] = RowwiseParallel()
    return of_vocabulary("model.embed_tokens", "lm_head") | of_attention("model.layers.*.self_attn") | mlp


def qwen3():
    # These norms see the heads of their rank only, so their gradients have to be summed over the ranks: dimension 2.
    norms = {
        f"model.layers.*.self_attn.{name}_norm": SequenceParallel(sequence_dim=2, use_local_output=True)
        for name in "qk"
    }
    return llama() | norms


def gpt2():
    # Its layers are Conv1D, for which torch has no style: the vocabulary alone is divided.
    return of_vocabulary("transformer.wte", "lm_head")


def mixtral():
    # Its experts are one parameter for all, for which torch has no style: every rank computes them whole.
    return of_vocabulary("model.embed_tokens", "lm_head") | of_attention("model.layers.*.self_attn")


def vit():
    mlp = {"vit.layers.*.mlp.fc1": ColwiseParallel(), "vit.layers.*.mlp.fc2": RowwiseParallel()}
    return of_attention("vit.layers.*.attention") | mlp


def t5():
    # Attention over the encoder's output stays whole: it adds a mask for all heads.
    plan = {}
    for stack, last in (("encoder", 1), ("decoder", 2)):
        attention = f"{stack}.block.*.layer.0.SelfAttention"
        plan |= of_attention(attention, "q", "k", "v", "o")
        plan[f"{attention}.relative_attention_bias"] = ColwiseParallel()  # one column for each head
        plan[f"{stack}.block.*.layer.{last}.DenseReluDense.wi"] = ColwiseParallel()
        plan[f"{stack}.block.*.layer.{last}.DenseReluDense.wo"] = RowwiseParallel()
    return plan


def with_adapters(plan, layers):
    """A plan for a model into which LoRA has been put, of which ``layers`` have adapters, all divided by columns."""
    adapted = {f"base_model.model.{name}": style for name, style in plan.items() if name not in layers}
    for name in layers:
        adapted[f"base_model.model.{name}.base_layer"] = ColwiseParallel()
        adapted[f"base_model.model.{name}.lora_B.default"] = ColwiseParallel()
    return adapted
