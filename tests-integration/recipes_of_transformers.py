"""Recipes upon models of transformers and adapters of PEFT; see recipes.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from recipes import Lit, sgd


def words(x, n=4):
    return (x[:, :n].abs() * 20).long() % 50


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_attention_heads=2,
            num_hidden_layers=2,
            vocab_size=50,
            pad_token_id=0,
        )
    )


def lora(m, **k):
    torch.manual_seed(1)
    import peft

    m = peft.get_peft_model(m, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **k))
    return m


def logps(model, w):
    lo = model(input_ids=w, use_cache=False).logits[:, :-1].log_softmax(-1)
    return lo.gather(2, w[:, 1:, None]).squeeze(2).sum(1)


class dpo_peft(Lit):
    """DPO as in TRL: the reference is the model without adapters."""

    def build(self):
        self.net = lora(tiny_llama())

    def training_step(self, b, i):
        c, r = words(b[0], 8), words(b[0].roll(1, 1), 8)
        pol = logps(self.net, torch.cat([c, r])).chunk(2)
        with torch.no_grad(), self.net.disable_adapter():
            ref = logps(self.net, torch.cat([c, r])).chunk(2)
        return self.keep(-F.logsigmoid(0.1 * ((pol[0] - ref[0]) - (pol[1] - ref[1]))).mean())

    def configure_optimizers(self):
        return sgd([p for p in self.parameters() if p.requires_grad], 0.5)


class dpo_ref_first(dpo_peft):
    def training_step(self, b, i):
        c, r = words(b[0], 8), words(b[0].roll(1, 1), 8)
        with torch.no_grad(), self.net.disable_adapter():
            ref = logps(self.net, torch.cat([c, r])).chunk(2)
        pol = [logps(self.net, c), logps(self.net, r)]
        return self.keep(-F.logsigmoid(0.1 * ((pol[0] - ref[0]) - (pol[1] - ref[1]))).mean())


class dpo_two_adapters(dpo_peft):
    """TRL's ref_adapter_name: `set_adapter` freezes one and trains the other in the step."""

    def build(self):
        self.net = lora(tiny_llama())
        import peft

        self.net.add_adapter("ref", peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        self.net.set_adapter("default")

    def training_step(self, b, i):
        c, r = words(b[0], 8), words(b[0].roll(1, 1), 8)
        self.net.set_adapter("ref")
        with torch.no_grad():
            ref = logps(self.net, torch.cat([c, r])).chunk(2)
        self.net.set_adapter("default")
        pol = logps(self.net, torch.cat([c, r])).chunk(2)
        return self.keep(-F.logsigmoid(0.1 * ((pol[0] - ref[0]) - (pol[1] - ref[1]))).mean())


class hf_generate(Lit):
    """REINFORCE upon what generate() samples in the step (GRPO)."""

    def build(self):
        self.net = tiny_llama()
        self.net.generation_config.eos_token_id = None

    def training_step(self, b, i):
        w = words(b[0], 4)
        with torch.no_grad():
            g = self.net.generate(
                w, attention_mask=torch.ones_like(w), max_new_tokens=4, do_sample=True, use_cache=True
            )
            old = logps(self.net, g)
        r = (g % 2).float().mean(1)
        a = (r - r.mean()) / (r.std() + 1e-4)
        lp = logps(self.net, g)
        return self.keep(-((lp - old).exp() * a).mean())


class hf_ckpt_grad(Lit):
    """transformers' own gradient checkpointing with a gradient of the embeddings: FreeLB upon a language model."""

    manual = True

    def build(self):
        self.net = tiny_llama()
        self.net.gradient_checkpointing_enable({"use_reentrant": False})

    def training_step(self, b, i):
        o = self.optimizers()
        o.zero_grad()
        w = words(b[0], 8)
        e = self.net.get_input_embeddings()(w)
        d = torch.zeros_like(e).uniform_(-0.1, 0.1)
        for _ in range(2):
            d.requires_grad_()
            l = self.net(inputs_embeds=self.net.get_input_embeddings()(w) + d, labels=w, use_cache=False).loss
            self.manual_backward(l)
            self.keep(l)
            d = (d + 0.1 * d.grad.sign()).detach()
        o.step()


class merged_adapters(dpo_peft):
    """Merge and unmerge of adapters in the step, as some samplers do."""

    def training_step(self, b, i):
        w = words(b[0], 8)
        with torch.no_grad():
            self.net.merge_adapter()
            s = logps(self.net, w)
            self.net.unmerge_adapter()
        return self.keep(-(logps(self.net, w) * s.softmax(0)).sum())


ALL = {
    name: value
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, Lit) and value is not Lit
}
