"""Steps as papers and their published code write them: each is a LightningModule, which keeps its losses.

They are written for one process, from the papers' code and from memory, without regard to this project. All ranks have
batches of their own. recipe_loops.py has some of them as loops of Fabric.
"""

from __future__ import annotations

import copy
import itertools
import math
import os

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import autograd, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

STEPS = 4


class Block(nn.Module):
    def __init__(self, h, drop=0.0):
        super().__init__()
        self.l1 = nn.Linear(h, h)
        self.l2 = nn.Linear(h, h)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return x + self.l2(self.drop(torch.tanh(self.l1(x))))


class MLP(nn.Module):
    def __init__(self, i=8, o=3, h=8, n=2, drop=0.0):
        super().__init__()
        self.inp = nn.Linear(i, h)
        self.blocks = nn.ModuleList(Block(h, drop) for _ in range(n))
        self.out = nn.Linear(h, o)

    def features(self, x):
        x = torch.tanh(self.inp(x))
        for b in self.blocks:
            x = b(x)
        return x

    def forward(self, x):
        return self.out(self.features(x))


def mlp(i=8, o=3, h=8, n=2, drop=0.0):
    return MLP(i, o, h, n, drop)


class Lit(pl.LightningModule):
    manual = False
    options = {}
    trainer_args = {}
    validates = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.kept = []
        self.automatic_optimization = not self.manual
        self.build()

    def build(self):
        self.net = mlp()

    def training_step(self, b, i):
        return self.keep(F.cross_entropy(self.net(b[0]), b[1]))

    def update(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def keep(self, *v):
        self.kept += [float(x.detach()) if isinstance(x, torch.Tensor) else float(x) for x in v]
        return v[0]

    def on_train_batch_start(self, b, i):
        torch.manual_seed(1000 * i + own_rank())

    def on_validation_batch_start(self, b, i, dataloader_idx=0):
        torch.manual_seed(5000 + 1000 * i + own_rank())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def own_rank():
    return int(os.environ["RANK"])


def data(rank):
    world_size = int(os.environ["WORLD_SIZE"])
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 8, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(world_size * STEPS)
    ][rank::world_size]


class Batches(Dataset):
    def __init__(self, rank):
        self.batches = data(rank)

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return tuple(tensor.clone() for tensor in self.batches[index])


def batches(rank):
    return DataLoader(Batches(rank), batch_size=None)


def adam(ps, lr=0.01):
    return torch.optim.Adam(ps, lr=lr, eps=1e-3)


def sgd(ps, lr=0.05):
    return torch.optim.SGD(ps, lr=lr)


def mse1(x):
    return F.mse_loss(x, torch.ones_like(x))


def mse0(x):
    return F.mse_loss(x, torch.zeros_like(x))


bce = F.binary_cross_entropy_with_logits


class cyclegan(Lit):
    manual = True

    def build(self):
        self.gab, self.gba, self.da, self.db = mlp(8, 8), mlp(8, 8), mlp(8, 1), mlp(8, 1)
        self.pool = []

    def configure_optimizers(self):
        return sgd(itertools.chain(self.gab.parameters(), self.gba.parameters())), sgd(
            itertools.chain(self.da.parameters(), self.db.parameters())
        )

    def set_requires_grad(self, nets, flag):
        for net in nets:
            net.requires_grad_(flag)

    def training_step(self, b, i):
        og, od = self.optimizers()
        a, bb = b[0], b[0].flip(0) * 0.5 + 1
        self.set_requires_grad([self.da, self.db], False)
        og.zero_grad()
        fb = self.gab(a)
        ra = self.gba(fb)
        fa = self.gba(bb)
        rb = self.gab(fa)
        idt = F.l1_loss(self.gab(bb), bb) + F.l1_loss(self.gba(a), a)
        lg = mse1(self.db(fb)) + mse1(self.da(fa)) + 10 * (F.l1_loss(ra, a) + F.l1_loss(rb, bb)) * 0.05 + 0.5 * idt
        self.manual_backward(lg)
        og.step()
        self.set_requires_grad([self.da, self.db], True)
        od.zero_grad()
        self.pool.append((fa.detach(), fb.detach()))
        pa, pb = self.pool[max(0, len(self.pool) - 2)]
        la = (mse1(self.da(a)) + mse0(self.da(pa))) * 0.5
        self.manual_backward(la)
        lb = (mse1(self.db(bb)) + mse0(self.db(pb))) * 0.5
        self.manual_backward(lb)
        od.step()
        self.keep(lg, la, lb)


class Adversaries(Lit):
    manual = True

    def build(self):
        self.g, self.d = mlp(4, 8), mlp(8, 1)

    def configure_optimizers(self):
        return adam(self.g.parameters()), adam(self.d.parameters())


class wgan_gp(Adversaries):
    def penalty(self, real, fake):
        alpha = torch.rand(real.size(0), 1)
        inter = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        out = self.d(inter)
        g = autograd.grad(
            outputs=out,
            inputs=inter,
            grad_outputs=torch.ones_like(out),
            create_graph=True,
            retain_graph=True,
            only_inputs=True,
        )[0]
        return ((g.view(g.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()

    def training_step(self, b, i):
        og, od = self.optimizers()
        z = torch.randn(8, 4)
        self.toggle_optimizer(od)
        for _ in range(2):
            fake = self.g(z).detach()
            ld = self.d(fake).mean() - self.d(b[0]).mean() + 10 * self.penalty(b[0], fake)
            self.update(od, ld)
        self.untoggle_optimizer(od)
        self.toggle_optimizer(og)
        lg = -self.d(self.g(z)).mean()
        self.update(og, lg)
        self.untoggle_optimizer(og)
        self.keep(ld, lg)


class stylegan2(Lit):
    manual = True

    def build(self):
        self.mapping = mlp(4, 8, n=1)
        self.synth = mlp(8, 8)
        self.d = mlp(8, 1)
        self.mean_path = 0

    def configure_optimizers(self):
        return adam([*self.mapping.parameters(), *self.synth.parameters()], 0.003), adam(self.d.parameters(), 0.003)

    def req(self, m, f):
        m.requires_grad_(f)

    def training_step(self, b, i):
        og, od = self.optimizers()
        real = b[0]
        self.req(self.mapping, False)
        self.req(self.synth, False)
        self.req(self.d, True)
        fp, rp = self.d(self.synth(self.mapping(torch.randn(8, 4)))), self.d(real)
        ld = F.softplus(-rp).mean() + F.softplus(fp).mean()
        self.d.zero_grad()
        self.manual_backward(ld)
        od.step()
        r1 = torch.tensor(0.0)
        if i % 2 == 0:
            real.requires_grad = True
            rp = self.d(real)
            (g,) = autograd.grad(outputs=rp.sum(), inputs=real, create_graph=True)
            r1 = g.pow(2).reshape(g.shape[0], -1).sum(1).mean()
            self.d.zero_grad()
            self.manual_backward(10 / 2 * r1 * 2 + 0 * rp[0].squeeze())
            od.step()
        self.req(self.mapping, True)
        self.req(self.synth, True)
        self.req(self.d, False)
        lg = F.softplus(-self.d(self.synth(self.mapping(torch.randn(8, 4))))).mean()
        self.mapping.zero_grad()
        self.synth.zero_grad()
        self.manual_backward(lg)
        og.step()
        pl = torch.tensor(0.0)
        if i % 2 == 0:
            w = self.mapping(torch.randn(4, 4))
            img = self.synth(w)
            noise = torch.randn_like(img) / math.sqrt(8)
            (g,) = autograd.grad(outputs=(img * noise).sum(), inputs=w, create_graph=True)
            lens = torch.sqrt(g.pow(2).sum(1))
            mean = self.mean_path + 0.01 * (lens.mean() - self.mean_path)
            pl = (lens - mean).pow(2).mean()
            self.mean_path = mean.detach()
            self.mapping.zero_grad()
            self.synth.zero_grad()
            self.manual_backward(2 * 2 * pl + 0 * img[0, 0])
            og.step()
        self.keep(ld, r1, lg, pl)


class dcgan_raw(Adversaries):
    def training_step(self, b, i):
        og, od = self.optimizers()
        self.d.zero_grad()
        e1 = bce(self.d(b[0]).view(-1), torch.ones(8))
        e1.backward()
        fake = self.g(torch.randn(8, 4))
        e2 = bce(self.d(fake.detach()).view(-1), torch.zeros(8))
        e2.backward()
        od.step()
        self.g.zero_grad()
        eg = bce(self.d(fake).view(-1), torch.ones(8))
        eg.backward()
        og.step()
        self.keep(e1 + e2, eg)


class ppo_rlhf(Lit):
    manual = True

    def build(self):
        self.policy = mlp(8, 3)
        self.value = mlp(8, 1)
        self.ref = copy.deepcopy(self.policy)
        self.ref.requires_grad_(False)
        self.reward = mlp(8, 3).eval().requires_grad_(False)

    def configure_optimizers(self):
        return adam([*self.policy.parameters(), *self.value.parameters()])

    def training_step(self, b, i):
        opt, x = self.optimizers(), b[0]
        with torch.no_grad():
            lp = self.policy(x).log_softmax(-1)
            a = torch.multinomial(lp.exp(), 1)
            old = lp.gather(1, a)
            ref = self.ref(x).log_softmax(-1).gather(1, a)
            r = self.reward(x).gather(1, a) - 0.1 * (old - ref)
            v = self.value(x)
            adv = r - v
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        for _ in range(2):
            for idx in torch.randperm(8).split(4):
                logits = self.policy(x[idx]).log_softmax(-1)
                ratio = (logits.gather(1, a[idx]) - old[idx]).exp()
                pg = torch.max(-adv[idx] * ratio, -adv[idx] * ratio.clamp(0.8, 1.2)).mean()
                nv = self.value(x[idx])
                vc = v[idx] + (nv - v[idx]).clamp(-0.2, 0.2)
                vl = 0.5 * torch.max((nv - r[idx]) ** 2, (vc - r[idx]) ** 2).mean()
                ent = -(logits.exp() * logits).sum(-1).mean()
                loss = pg + 0.5 * vl - 0.01 * ent
                opt.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(opt, 0.5, "norm")
                opt.step()
                self.keep(loss)


class gradnorm(Lit):
    """The weights of tasks are trained by the norms of their gradients at a shared layer."""

    manual = True

    def build(self):
        self.trunk = mlp(8, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
        self.w = nn.Parameter(torch.ones(2))
        self.l0 = None

    def configure_optimizers(self):
        return sgd([*self.trunk.parameters(), *self.heads.parameters()]), sgd([self.w])

    def losses(self, b):
        f = self.trunk(b[0])
        ls = torch.stack(
            [
                (self.heads[0](f).squeeze() - b[1]).pow(2).mean(),
                (self.heads[1](f).squeeze() - b[0].sum(1)).pow(2).mean(),
            ]
        )
        if self.l0 is None:
            self.l0 = ls.detach()
        return ls

    def distance(self, ls, norms):
        ratio = ls.detach() / self.l0
        target = (norms.mean() * (ratio / ratio.mean()) ** 1.5).detach()
        return (norms - target).abs().sum()

    def training_step(self, b, i):
        o, ow = self.optimizers()
        wl = self.w * (ls := self.losses(b))
        o.zero_grad()
        ow.zero_grad()
        norms = torch.stack(
            [
                autograd.grad(wl[t], self.trunk.out.weight, retain_graph=True, create_graph=True)[0].norm()
                for t in range(2)
            ]
        )
        gl = self.distance(ls, norms)
        self.manual_backward(wl.sum() + gl)
        o.step()
        ow.step()
        self.keep(wl.sum(), gl)


class gradnorm_published(gradnorm):
    """The form of pytorch-grad-norm: `loss.backward(retain_graph=True)`, then the weights' gradient by `autograd.grad`."""

    def training_step(self, b, i):
        o, ow = self.optimizers()
        ls = self.losses(b)
        o.zero_grad()
        wl = self.w * ls
        self.manual_backward(wl.sum(), retain_graph=True)
        self.w.grad.data = self.w.grad.data * 0.0
        norms = torch.stack(
            [
                torch.norm(self.w[t] * autograd.grad(ls[t], self.trunk.out.weight, retain_graph=True)[0])
                for t in range(2)
            ]
        )
        gl = self.distance(ls, norms)
        self.w.grad = autograd.grad(gl, self.w)[0]
        o.step()
        ow.step()
        self.keep(wl.sum(), gl)


class awp_kaggle(Lit):
    """Adversarial weight perturbation as written in many notebooks."""

    manual = True

    def training_step(self, b, i):
        opt = self.optimizers()
        loss = F.cross_entropy(self.net(b[0]), b[1])
        opt.zero_grad()
        self.manual_backward(loss)
        backup = {}
        for n, p in self.net.named_parameters():
            if p.grad is not None and "weight" in n:
                backup[n] = p.data.clone()
                n1, n2 = torch.norm(p.grad), torch.norm(p.data.detach())
                if n1 != 0:
                    p.data.add_(0.1 * p.grad / (n1 + 1e-6) * (n2 + 1e-6))
        adv = F.cross_entropy(self.net(b[0]), b[1])
        self.manual_backward(adv)
        for n, p in self.net.named_parameters():
            if n in backup:
                p.data = backup[n]
        opt.step()
        self.keep(loss, adv)


class awp_proxy(Lit):
    """AT-AWP: a proxy with an optimizer of its own is made worse, and the difference is added to the weights."""

    manual = True

    def build(self):
        self.net = mlp()
        self.proxy = copy.deepcopy(self.net)

    def configure_optimizers(self):
        return sgd(self.net.parameters()), sgd(self.proxy.parameters(), 0.01)

    def training_step(self, b, i):
        opt, popt = self.optimizers()
        self.proxy.load_state_dict(self.net.state_dict())
        self.proxy.train()
        loss = -F.cross_entropy(self.proxy(b[0]), b[1])
        self.update(popt, loss)
        diff = {}
        with torch.no_grad():
            for (n, p), q in zip(self.net.named_parameters(), self.proxy.parameters()):
                if "weight" in n:
                    d = q - p
                    diff[n] = p.norm() / (d.norm() + 1e-20) * d * 0.1
                    p.add_(diff[n])
        adv = F.cross_entropy(self.net(b[0]), b[1])
        self.update(opt, adv)
        with torch.no_grad():
            for n, p in self.net.named_parameters():
                if n in diff:
                    p.sub_(diff[n])
        self.keep(loss, adv)


class jacobian_reg(Lit):
    """Hoffman et al.: random projections of the Jacobian."""

    def training_step(self, b, i):
        x = b[0].requires_grad_(True)
        y = self.net(x)
        J = 0
        for _ in range(2):
            v = torch.randn_like(y)
            v = v / v.norm(dim=1, keepdim=True)
            (g,) = autograd.grad(y, x, v, retain_graph=True, create_graph=True)
            J = J + 3 * g.norm() ** 2 / (2 * 8)
        return self.keep(F.cross_entropy(y, b[1]) + 0.1 * J)


class hutchinson(Lit):
    """FFJORD's and the Hessian's trace, by products with random vectors."""

    def build(self):
        self.net = mlp(8, 8)
        self.energy = mlp(8, 1)

    def training_step(self, b, i):
        x = b[0].requires_grad_(True)
        e = torch.randn_like(x)
        dz = self.net(x)
        div = (autograd.grad(dz, x, e, create_graph=True)[0] * e).sum(1)
        (g,) = autograd.grad(self.energy(x).sum(), x, create_graph=True)
        v = torch.randint(0, 2, x.shape).float() * 2 - 1
        (hv,) = autograd.grad(g, x, v, create_graph=True)
        return self.keep(dz.pow(2).mean() + div.pow(2).mean() + (hv * v).sum(1).pow(2).mean())


class hvp_functional(Lit):
    def build(self):
        self.net = mlp(8, 1)

    def training_step(self, b, i):
        v = torch.randn_like(b[0])
        out, hv = autograd.functional.hvp(lambda x: self.net(x).pow(2).sum(), b[0], v, create_graph=True)
        _, jv = autograd.functional.jvp(self.net, b[0], v, create_graph=True)
        return self.keep(out / 8 + hv.pow(2).mean() + jv.pow(2).mean())


class func_grad(Lit):
    """torch.func over inputs: grad, vmap of grad, jvp, jacrev."""

    def build(self):
        self.net = mlp(8, 1)

    def training_step(self, b, i):
        f = lambda x: self.net(x).sum()
        g = torch.func.grad(f)(b[0])
        per = torch.func.vmap(torch.func.grad(lambda x: self.net(x).squeeze()))(b[0])
        _, jv = torch.func.jvp(self.net, (b[0],), (torch.ones_like(b[0]),))
        return self.keep(g.pow(2).mean() + per.pow(2).mean() + jv.pow(2).mean() + self.net(b[0]).pow(2).mean())


class func_laplacian(Lit):
    """A Laplacian by forward over reverse, as physics codes write it."""

    def build(self):
        self.net = mlp(2, 1)

    def training_step(self, b, i):
        u = lambda x: self.net(x).squeeze()
        lap = torch.func.vmap(lambda x: torch.func.hessian(u)(x).diagonal().sum())(b[0][:, :2])
        return self.keep((lap - 1).pow(2).mean() + self.net(b[0][:, :2]).pow(2).mean())


class vat(Lit):
    """lyakaap/VAT-pytorch: a backward pass inside the step, whose gradients are thrown away."""

    def training_step(self, b, i):
        x = b[0]
        with torch.no_grad():
            pred = F.softmax(self.net(x), dim=1)
        d = F.normalize(torch.rand(x.shape).sub(0.5), dim=1)
        for _ in range(2):
            d.requires_grad_()
            F.kl_div(F.log_softmax(self.net(x + 0.5 * d), 1), pred, reduction="batchmean").backward()
            d = F.normalize(d.grad, dim=1)
            self.net.zero_grad()
        lds = F.kl_div(F.log_softmax(self.net(x + 1.0 * d), 1), pred, reduction="batchmean")
        return self.keep(F.cross_entropy(self.net(x), b[1]) + lds)


class moco(Lit):
    """facebookresearch/moco: the key encoder's weights are assigned at the start of forward()."""

    def build(self):
        self.q, self.k = mlp(), mlp()
        for a, c in zip(self.q.parameters(), self.k.parameters()):
            c.data.copy_(a.data)
            c.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(3, 32), dim=0))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def momentum(self):
        for a, c in zip(self.q.parameters(), self.k.parameters()):
            self.write(a, c)

    def write(self, a, c):
        c.data = c.data * 0.9 + a.data * 0.1

    def training_step(self, b, i):
        q = F.normalize(self.q(b[0]), dim=1)
        with torch.no_grad():
            self.momentum()
            k = F.normalize(self.k(b[0] + 0.1 * torch.randn_like(b[0])), dim=1)
        logits = (
            torch.cat(
                [
                    torch.einsum("nc,nc->n", q, k).unsqueeze(-1),
                    torch.einsum("nc,ck->nk", q, self.queue.clone().detach()),
                ],
                1,
            )
            / 0.2
        )
        with torch.no_grad():
            p = int(self.ptr)
            self.queue[:, p : p + 8] = k.T
            self.ptr[0] = (p + 8) % 32
        return self.keep(F.cross_entropy(logits, torch.zeros(8, dtype=torch.long)))

    def configure_optimizers(self):
        return sgd(self.q.parameters())


class moco_in_place(moco):
    def write(self, a, c):
        c.data.mul_(0.9).add_(a.data, alpha=0.1)


class moco_copy(moco):
    """As the refusal advises."""

    def write(self, a, c):
        c.data.copy_(c.data * 0.9 + a.data * 0.1)


class vqvae_buffers(Lit):
    """rosinality: the codebook is a buffer that follows the batch."""

    def build(self):
        self.enc, self.dec = mlp(8, 4), mlp(4, 8)
        for n, v in (("embed", torch.randn(4, 16)), ("size", torch.zeros(16)), ("avg", torch.randn(4, 16))):
            self.register_buffer(n, v)

    def training_step(self, b, i):
        z = self.enc(b[0])
        d = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        ind = d.min(1)[1]
        one = F.one_hot(ind, 16).type(z.dtype)
        qz = F.embedding(ind, self.embed.T)
        self.size.data.mul_(0.9).add_(one.sum(0), alpha=0.1)
        self.avg.data.mul_(0.9).add_(z.detach().T @ one, alpha=0.1)
        n = self.size.sum()
        self.embed.data.copy_(self.avg / ((self.size + 1e-3) / (n + 16e-3) * n).unsqueeze(0))
        diff = (qz.detach() - z).pow(2).mean()
        qz = z + (qz - z).detach()
        return self.keep(F.mse_loss(self.dec(qz), b[0]) + 0.25 * diff)


class vqvae_parameters(Lit):
    """zalandoresearch: parameters are replaced in each forward pass."""

    def build(self):
        self.enc, self.dec = mlp(8, 4), mlp(4, 8)
        self.emb = nn.Embedding(16, 4)
        self.emb.weight.data.normal_()
        self.register_buffer("size", torch.zeros(16))
        self.w = nn.Parameter(torch.randn(16, 4))

    def training_step(self, b, i):
        z = self.enc(b[0])
        d = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.emb.weight.t() + self.emb.weight.pow(2).sum(1)
        ind = d.argmin(1).unsqueeze(1)
        one = torch.zeros(8, 16).scatter_(1, ind, 1)
        qz = one @ self.emb.weight
        self.size = self.size * 0.9 + 0.1 * one.sum(0)
        n = self.size.sum()
        s = (self.size + 1e-3) / (n + 16e-3) * n
        self.write(one.t() @ z, s)
        e = F.mse_loss(qz.detach(), z)
        qz = z + (qz - z).detach()
        return self.keep(F.mse_loss(self.dec(qz), b[0]) + 0.25 * e)

    def write(self, dw, s):
        self.w = nn.Parameter(self.w * 0.9 + 0.1 * dw)
        self.emb.weight = nn.Parameter(self.w / s.unsqueeze(1))

    def configure_optimizers(self):
        return sgd([*self.enc.parameters(), *self.dec.parameters()])


class deq(Lit):
    """The tutorial of deep implicit layers: a hook of the fixed point solves for its gradient."""

    def build(self):
        self.inp = nn.Linear(8, 8)
        self.f1 = Block(8)
        self.out = nn.Linear(8, 3)

    def f(self, z, x):
        return 0.5 * torch.tanh(self.f1(0.5 * z) + x)

    def solve(self, f, z):
        for _ in range(20):
            z = f(z)
        return z

    def training_step(self, b, i):
        x = self.inp(b[0])
        with torch.no_grad():
            z = self.solve(lambda z: self.f(z, x), torch.zeros_like(x))
        z = self.f(z, x)
        z0 = z.clone().detach().requires_grad_()
        f0 = self.f(z0, x)

        def hook(grad):
            return self.solve(lambda y: autograd.grad(f0, z0, y, retain_graph=True)[0] + grad, torch.zeros_like(grad))

        z.register_hook(hook)
        return self.keep(F.cross_entropy(self.out(z), b[1]))


class deq_blocks(deq):
    """The same, whose function is made of several blocks."""

    def build(self):
        self.inp = nn.Linear(8, 8)
        self.f1 = nn.Sequential(Block(8), Block(8))
        self.out = nn.Linear(8, 3)


class RevFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, blocks, *params):
        with torch.no_grad():
            for f, g in blocks:
                a, c = x.chunk(2, 1)
                a = a + f(c)
                c = c + g(a)
                x = torch.cat([a, c], 1)
        ctx.y, ctx.blocks = x.detach(), blocks
        return x

    @staticmethod
    def backward(ctx, dy):
        y = ctx.y
        grads = []
        for f, g in reversed(ctx.blocks):
            a, c = y.chunk(2, 1)
            da, dc = dy.chunk(2, 1)
            with torch.enable_grad():
                a = a.detach().requires_grad_()
                ga = g(a)
                ga.backward(dc)
            with torch.no_grad():
                c = c - ga
                da = da + a.grad
            with torch.enable_grad():
                c = c.detach().requires_grad_()
                fc = f(c)
                fc.backward(da)
            with torch.no_grad():
                a = a.detach() - fc
                dc = dc + c.grad
                y, dy = torch.cat([a, c], 1), torch.cat([da, dc], 1)
        return dy, None, *[None] * len(list(ctx.needs_input_grad[2:]))


class revnet(Lit):
    """Reversible blocks: activations are computed again in the backward pass, which runs backward passes."""

    def build(self):
        self.inp = nn.Linear(8, 8)
        self.out = nn.Linear(8, 3)
        self.pairs = nn.ModuleList(nn.ModuleList([Block(4), Block(4)]) for _ in range(2))

    def training_step(self, b, i):
        return self.keep(F.cross_entropy(self.out(RevFunction.apply(self.inp(b[0]), list(self.pairs))), b[1]))


class imaml(Lit):
    """Implicit MAML: the inner loop trains copies of the weights; conjugate gradients with Hessian products; gradients are set by hand."""

    manual = True
    options = {"auto_wrap_policy": None}

    def build(self):
        self.net = mlp(n=1)

    def training_step(self, b, i):
        opt = self.optimizers()
        opt.zero_grad()
        base = {k: v for k, v in self.net.named_parameters()}
        x, y = b
        fast = {k: v.detach().clone().requires_grad_() for k, v in base.items()}

        def inner(w):
            return F.cross_entropy(torch.func.functional_call(self.net, w, (x[:4],)), y[:4]) + sum(
                ((w[k] - base[k].detach()) ** 2).sum() for k in w
            )

        for _ in range(3):
            gs = autograd.grad(inner(fast), list(fast.values()))
            fast = {k: (v - 0.1 * g).detach().requires_grad_() for (k, v), g in zip(fast.items(), gs)}
        outer = F.cross_entropy(torch.func.functional_call(self.net, fast, (x[4:],)), y[4:])
        gs = autograd.grad(outer, list(fast.values()))
        first = autograd.grad(inner(fast), list(fast.values()), create_graph=True)
        v = [g.clone() for g in gs]
        for _ in range(3):
            hv = autograd.grad(first, list(fast.values()), v, retain_graph=True)
            v = [g - 0.2 * (h - 2 * u) for g, h, u in zip(gs, hv, v)]
        # the published code sets p.grad; a surrogate whose gradient this is does the same in any strategy
        self.surrogate(base, v, opt)
        self.keep(outer)

    def surrogate(self, base, v, opt):
        self.manual_backward(sum((p * u).sum() for p, u in zip(base.values(), v)))
        opt.step()


class imaml_sets_grad(imaml):
    def surrogate(self, base, v, opt):
        for p, u in zip(base.values(), v):
            p.grad = u
        opt.step()


class maml(Lit):
    """MAML through the inner steps, with functional_call."""

    options = {"auto_wrap_policy": None}

    def build(self):
        self.net = mlp(n=2)

    def training_step(self, b, i):
        x, y = b
        w = dict(self.net.named_parameters())
        for _ in range(2):
            loss = F.cross_entropy(torch.func.functional_call(self.net, w, (x[:4],)), y[:4])
            g = autograd.grad(loss, list(w.values()), create_graph=True)
            w = {k: p - 0.1 * d for (k, p), d in zip(w.items(), g)}
        return self.keep(F.cross_entropy(torch.func.functional_call(self.net, w, (x[4:],)), y[4:]))


class maml_by_copies(maml):
    """MAML as learn2learn and higher do it: a module that copies the attributes of one, with weights of its own."""

    def copied(self, module):
        copy = module.__new__(type(module))
        copy.__dict__ = {**module.__dict__, "_parameters": dict(module._parameters), "_modules": {}}
        for name, part in module._modules.items():
            copy._modules[name] = self.copied(part)
        return copy

    def training_step(self, b, i):
        x, y = b
        net = self.copied(self.net)
        places = [(module, name) for module in net.modules() for name in module._parameters]
        for _ in range(2):
            w = [module._parameters[name] for module, name in places]
            g = autograd.grad(F.cross_entropy(net(x[:4]), y[:4]), w, create_graph=True)
            for (module, name), p, d in zip(places, w, g):
                module._parameters[name] = p - 0.1 * d
        return self.keep(F.cross_entropy(net(x[4:]), y[4:]))


class maml_auto(maml):
    """The same with units: refused, and advised to write auto_wrap_policy=None."""

    options = {}


class freelb(Lit):
    """zhuchen03/FreeLB: several ascents upon the embeddings, whose gradients all count."""

    manual = True

    def build(self):
        self.emb = nn.Embedding(20, 8)
        self.net = mlp()

    def training_step(self, b, i):
        opt = self.optimizers()
        opt.zero_grad()
        words = (b[0].abs() * 7).long() % 20
        delta = torch.zeros(8, 8).uniform_(-0.1, 0.1)
        K = 3
        delta.requires_grad_()
        for k in range(K):
            e = self.emb(words).mean(1)
            delta.requires_grad_()
            loss = F.cross_entropy(self.net(e + delta), b[1]) / K
            self.manual_backward(loss)
            self.keep(loss)
            g = delta.grad.clone().detach()
            delta = (delta + 0.1 * g / g.norm(dim=1, keepdim=True).clamp(min=1e-8)).detach()
        self.clip_gradients(opt, 1.0, "norm")
        opt.step()


class rdrop(Lit):
    def build(self):
        self.net = mlp(drop=0.3)

    def training_step(self, b, i):
        p, q = self.net(b[0]), self.net(b[0])
        ce = 0.5 * (F.cross_entropy(p, b[1]) + F.cross_entropy(q, b[1]))
        kl = F.kl_div(p.log_softmax(-1), q.softmax(-1), reduction="sum") + F.kl_div(
            q.log_softmax(-1), p.softmax(-1), reduction="sum"
        )
        return self.keep(ce + 0.5 * kl / 8)


class smart(Lit):
    """archinetai/smart-pytorch."""

    def training_step(self, b, i):
        e = b[0]
        state = self.net(e)
        noise = (torch.randn_like(e) * 1e-2).requires_grad_()
        skl = lambda p, q: (
            F.kl_div(p.log_softmax(-1), q.softmax(-1), reduction="batchmean")
            + F.kl_div(q.log_softmax(-1), p.softmax(-1), reduction="batchmean")
        )
        for k in itertools.count():
            per = self.net(e + noise)
            if k == 2:
                break
            (g,) = autograd.grad(
                F.kl_div(per.log_softmax(-1), state.detach().softmax(-1), reduction="batchmean"), noise
            )
            step = noise + 0.1 * g
            noise = (step / (step.norm(p=float("inf"), dim=1, keepdim=True) + 1e-6)).detach().requires_grad_()
        return self.keep(F.cross_entropy(state, b[1]) + 0.5 * skl(per, state))


class checkpointed_penalty(Lit):
    """Double backprop through activation checkpointing."""

    def build(self):
        self.net = mlp(8, 1)

    def call(self, x):
        h = torch.tanh(self.net.inp(x))
        for k in self.net.blocks:
            h = checkpoint(k, h, use_reentrant=False)
        return self.net.out(h)

    def training_step(self, b, i):
        x = b[0].requires_grad_()
        y = self.call(x)
        (g,) = autograd.grad(y.sum(), x, create_graph=True)
        return self.keep(y.pow(2).mean() + (g.norm(dim=1) - 1).pow(2).mean())


class hnn(Lit):
    """greydanus/hamiltonian-nn: forward() differentiates, in validation too."""

    validates = True
    trainer_args = {"inference_mode": False}

    def build(self):
        self.h = mlp(8, 1)
        self.register_buffer("M", torch.cat([torch.eye(8)[4:], -torch.eye(8)[:4]]))

    def forward(self, x):
        with torch.enable_grad():
            x = x.requires_grad_() if x.is_leaf else x
            return autograd.grad(self.h(x).sum(), x, create_graph=True)[0] @ self.M.t()

    def training_step(self, b, i):
        return self.keep((self(b[0]) - b[0].roll(1, 1)).pow(2).mean())

    def validation_step(self, b, i):
        x = b[0]
        for _ in range(2):
            x = (x + 0.1 * self(x)).detach()
        self.keep((self(x) - x.roll(1, 1)).pow(2).mean())


class ebm(Lit):
    """Tutorial 8 of UvA's deep learning course."""

    def build(self):
        self.cnn = mlp(8, 1)
        self.examples = [torch.rand(1, 8) * 2 - 1 for _ in range(8)]

    def sample(self):
        x = torch.cat([self.examples[k] for k in torch.randint(0, len(self.examples), (8,)).tolist()]).detach()
        was = self.cnn.training
        self.cnn.eval()
        self.cnn.requires_grad_(False)
        x.requires_grad = True
        had = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        noise = torch.randn(x.shape)
        for _ in range(3):
            noise.normal_(0, 0.005)
            x.data.add_(noise.data)
            x.data.clamp_(-1.0, 1.0)
            out = -self.cnn(x)
            out.sum().backward()
            x.grad.data.clamp_(-0.03, 0.03)
            x.data.add_(-1.0 * x.grad.data)
            x.grad.detach_()
            x.grad.zero_()
            x.data.clamp_(-1.0, 1.0)
        self.cnn.requires_grad_(True)
        self.cnn.train(was)
        torch.set_grad_enabled(had)
        self.examples = [t.detach() for t in x.chunk(8)] + self.examples
        return x

    def training_step(self, b, i):
        real = b[0].add_(torch.randn_like(b[0]) * 0.005).clamp_(-1.0, 1.0)
        fake = self.sample()
        rout, fout = self.cnn(torch.cat([real, fake])).chunk(2)
        return self.keep(0.1 * (rout**2 + fout**2).mean() + (fout.mean() - rout.mean()))


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a):
        ctx.a = a
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.neg() * ctx.a, None


class dann(Lit):
    def build(self):
        self.f = mlp(8, 8)
        self.cls = nn.Linear(8, 3)
        self.dom = mlp(8, 2, n=1)

    def training_step(self, b, i):
        a = 2 / (1 + math.exp(-10 * i / 4)) - 1
        s, t = self.f(b[0]), self.f(b[0] * 2 + 1)
        z, o = torch.zeros(8).long(), torch.ones(8).long()
        return self.keep(
            F.cross_entropy(self.cls(s), b[1])
            + F.cross_entropy(self.dom(Reverse.apply(s, a)), z)
            + F.cross_entropy(self.dom(Reverse.apply(t, a)), o)
        )


def project(gs):
    out = [g.clone() for g in gs]
    for i, g in enumerate(out):
        for j, h in enumerate(gs):
            if i != j and (d := torch.dot(g, h)) < 0:
                g -= d * h / h.norm() ** 2
    return out


class pcgrad_grad(Lit):
    """Gradients of tasks by torch.autograd.grad, projected, and set as .grad."""

    manual = True

    def build(self):
        self.net = mlp(8, 3)

    def training_step(self, b, i):
        opt = self.optimizers()
        opt.zero_grad()
        out = self.net(b[0])
        ls = [F.cross_entropy(out, b[1]), (out.sum(1) - b[0].sum(1)).pow(2).mean()]
        ps = list(self.net.parameters())
        gs = [torch.cat([g.flatten() for g in autograd.grad(l, ps, retain_graph=True)]) for l in ls]
        g = sum(project(gs))
        self.set(opt, ps, g.split([p.numel() for p in ps]))
        self.keep(sum(ls))

    def set(self, opt, ps, gs):
        for p, g in zip(ps, gs):
            p.grad = g.view_as(p)
        opt.step()


class pcgrad_backward(Lit):
    """WeiChengTseng/Pytorch-PCGrad: a backward pass for each task, whose gradients are read and set."""

    manual = True

    def build(self):
        self.net = mlp(8, 3)

    def training_step(self, b, i):
        opt = self.optimizers()
        out = self.net(b[0])
        ls = [F.cross_entropy(out, b[1]), (out.sum(1) - b[0].sum(1)).pow(2).mean()]
        gs = []
        for l in ls:
            opt.zero_grad(set_to_none=True)
            self.manual_backward(l, retain_graph=True)
            gs.append(torch.cat([p.grad.clone().flatten() for g in opt.param_groups for p in g["params"]]))
        g = sum(project(gs))
        k = 0
        opt.zero_grad(set_to_none=True)
        for gr in opt.param_groups:
            for p in gr["params"]:
                p.grad = g[k : k + p.numel()].view_as(p).clone()
                k += p.numel()
        opt.step()
        self.keep(sum(ls))


class cosine_aux(Lit):
    """Du et al.: an auxiliary loss counts where its gradient agrees at the shared features."""

    def build(self):
        self.f = mlp(8, 8)
        self.main = nn.Linear(8, 3)
        self.aux = nn.Linear(8, 1)

    def losses(self, b):
        f = self.f(b[0])
        return f, F.cross_entropy(self.main(f), b[1]), (self.aux(f).squeeze() - b[0].sum(1)).pow(2).mean()

    def training_step(self, b, i):
        f, m, a = self.losses(b)
        (gm,) = autograd.grad(m, f, retain_graph=True)
        (ga,) = autograd.grad(a, f, retain_graph=True)
        return self.keep(m + F.cosine_similarity(gm.flatten(), ga.flatten(), 0).clamp(min=0).detach() * a)


class cosine_aux_params(cosine_aux):
    """The same with the gradients of the shared parameters, as published."""

    def training_step(self, b, i):
        _, m, a = self.losses(b)
        ps = list(self.f.parameters())
        gm = torch.cat([g.flatten() for g in autograd.grad(m, ps, retain_graph=True)])
        ga = torch.cat([g.flatten() for g in autograd.grad(a, ps, retain_graph=True)])
        return self.keep(m + F.cosine_similarity(gm, ga, 0).clamp(min=0).detach() * a)


class tent(Lit):
    """Entropy minimisation in validation_step: the optimizer steps there."""

    validates = True
    trainer_args = {"inference_mode": False}

    @torch.enable_grad()
    def validation_step(self, b, i):
        o = self.net(b[0])
        loss = -(o.softmax(1) * o.log_softmax(1)).sum(1).mean(0)
        self.step(loss)
        self.keep(loss, F.cross_entropy(self.net(b[0]), b[1]))

    def step(self, loss):
        opt = self.trainer.optimizers[0]
        opt.zero_grad()
        loss.backward()
        opt.step()
        opt.zero_grad()


class tent_manual(tent):
    manual = True

    def training_step(self, b, i):
        opt = self.optimizers()
        opt.zero_grad()
        loss = F.cross_entropy(self.net(b[0]), b[1])
        self.manual_backward(loss)
        opt.step()
        self.keep(loss)

    def step(self, loss):
        opt = self.optimizers()
        self.update(opt, loss)
        opt.zero_grad()


class memo_inputs(Lit):
    """Test-time: the input is optimised in validation_step, by autograd.grad."""

    validates = True
    trainer_args = {"inference_mode": False}

    @torch.enable_grad()
    def validation_step(self, b, i):
        x = b[0].clone().requires_grad_()
        o = torch.optim.SGD([x], lr=0.5)
        for _ in range(2):
            l = F.cross_entropy(self.net(x), b[1])
            x.grad = autograd.grad(l, x)[0]
            o.step()
        self.keep(l)


class gradcam(Lit):
    """Hooks of a layer and of its activation, and a backward pass in validation_step."""

    validates = True
    trainer_args = {"inference_mode": False}

    def build(self):
        self.net = mlp()
        self.acts = []
        self.net.blocks[1].register_forward_hook(self.save)

    def save(self, m, a, out):
        if self.trainer.validating or self.trainer.sanity_checking:
            self.acts.append(out)
            out.register_hook(lambda g: self.acts.append(g))

    def validation_step(self, b, i):
        with torch.enable_grad():
            x = b[0].clone().requires_grad_()
            self.acts = []
            o = self.net(x)
            self.zero_grad()
            o.gather(1, o.argmax(1, keepdim=True)).sum().backward()
            a, g = self.acts
            self.zero_grad()
            self.keep(F.relu((a * g.mean(0, keepdim=True)).sum(1)).sum())


class wgan_clip(Adversaries):
    def configure_optimizers(self):
        return torch.optim.RMSprop(self.g.parameters(), lr=0.003, eps=1e-3), torch.optim.RMSprop(
            self.d.parameters(), lr=0.003, eps=1e-3
        )

    def training_step(self, b, i):
        og, od = self.optimizers()
        one = torch.tensor(1.0)
        mone = one * -1
        self.d.requires_grad_(True)
        for _ in range(2):
            for p in self.d.parameters():
                p.data.clamp_(-0.1, 0.1)
            self.d.zero_grad()
            er = self.d(b[0]).mean()
            er.backward(one)
            with torch.no_grad():
                z = self.g(torch.randn(8, 4))
            ef = self.d(z).mean()
            ef.backward(mone)
            od.step()
        self.d.requires_grad_(False)
        self.g.zero_grad()
        eg = self.d(self.g(torch.randn(8, 4))).mean()
        eg.backward(one)
        og.step()
        self.keep(er - ef, eg)


class mean_teacher(Lit):
    def build(self):
        self.s = mlp()
        self.t = copy.deepcopy(self.s).requires_grad_(False)

    def training_step(self, b, i):
        with torch.no_grad():
            for p, q in zip(self.t.parameters(), self.s.parameters()):
                p.mul_(0.9).add_(q, alpha=0.1)
            t = self.t(b[0] + 0.1 * torch.randn_like(b[0])).softmax(1)
        o = self.s(b[0] + 0.1 * torch.randn_like(b[0]))
        return self.keep(F.cross_entropy(o, b[1]) + F.mse_loss(o.softmax(1), t))

    def configure_optimizers(self):
        return sgd(self.s.parameters())


class byol(mean_teacher):
    """The target follows in on_train_batch_end, by .data."""

    def build(self):
        super().build()
        self.p = mlp(3, 3, n=1)

    def configure_optimizers(self):
        return sgd([*self.s.parameters(), *self.p.parameters()])

    def training_step(self, b, i):
        a, c = b[0] + 0.1 * torch.randn_like(b[0]), b[0] + 0.1 * torch.randn_like(b[0])
        with torch.no_grad():
            ta, tc = self.t(a), self.t(c)
        f = lambda p, z: 2 - 2 * F.cosine_similarity(p, z.detach(), dim=-1).mean()
        return self.keep(f(self.p(self.s(a)), tc) + f(self.p(self.s(c)), ta))

    def on_train_batch_end(self, *a):
        for q, p in zip(self.s.parameters(), self.t.parameters()):
            p.data.mul_(0.9).add_(q.data, alpha=0.1)


class simsiam(Lit):
    def build(self):
        self.f = mlp()
        self.h = mlp(3, 3, n=1)

    def training_step(self, b, i):
        a, c = b[0] + 0.1 * torch.randn_like(b[0]), b[0] + 0.1 * torch.randn_like(b[0])
        z1, z2 = self.f(a), self.f(c)
        p1, p2 = self.h(z1), self.h(z2)
        return self.keep(
            -(F.cosine_similarity(p1, z2.detach()).mean() + F.cosine_similarity(p2, z1.detach()).mean()) * 0.5
        )


class dino(Lit):
    """Teacher and student share the crops; the centre is a buffer; last layer is frozen in the first epoch (its gradients are dropped); weight-normed head."""

    manual = True

    def build(self):
        self.s = nn.Sequential(mlp(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 6, bias=False)))
        self.t = nn.Sequential(mlp(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 6, bias=False)))
        self.t.load_state_dict(self.s.state_dict())
        self.t.requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 6))

    def configure_optimizers(self):
        return sgd(self.s.parameters())

    def training_step(self, b, i):
        opt = self.optimizers()
        a, c = b[0], b[0] + 0.1 * torch.randn_like(b[0])
        with torch.no_grad():
            t = self.t(torch.cat([a, c]))
        s = self.s(torch.cat([a, c])) / 0.1
        ts = F.softmax((t - self.center) / 0.04, -1).detach().chunk(2)
        ss = s.chunk(2)
        loss = (-ts[0] * F.log_softmax(ss[1], -1)).sum(-1).mean() + (-ts[1] * F.log_softmax(ss[0], -1)).sum(-1).mean()
        self.center.mul_(0.9).add_(t.mean(0, keepdim=True), alpha=0.1)
        opt.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(opt, 3.0, "norm")
        if i < 2:
            for n, p in self.s.named_parameters():
                if n.startswith("1."):
                    p.grad = None
        opt.step()
        with torch.no_grad():
            for q, k in zip(self.s.parameters(), self.t.parameters()):
                k.data.mul_(0.9).add_(q.detach().data, alpha=0.1)
        self.keep(loss)


class gradual_unfreeze(Lit):
    def build(self):
        self.net = mlp(n=3)

    def on_train_batch_start(self, b, i):
        super().on_train_batch_start(b, i)
        for k, blk in enumerate(self.net.blocks):
            for p in blk.parameters():
                p.requires_grad = k >= 3 - i
        self.net.inp.requires_grad_(i == 3)


class progressive(Lit):
    """Deeper layers fade in; layers that no rank has used have no gradient."""

    manual = True

    def build(self):
        self.inp = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.tos = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.d = mlp(8, 1)

    def gen(self, z, depth, alpha):
        h = self.inp(z)
        prev = None
        for k in range(depth + 1):
            prev = h
            h = self.blocks[k](h)
        out = self.tos[depth](h)
        return out if depth == 0 else alpha * out + (1 - alpha) * self.tos[depth - 1](prev)

    def configure_optimizers(self):
        return adam([*self.inp.parameters(), *self.blocks.parameters(), *self.tos.parameters()]), adam(
            self.d.parameters()
        )

    def training_step(self, b, i):
        og, od = self.optimizers()
        dep, al = min(i, 2), 0.3
        z = torch.randn(8, 8)
        ld = F.softplus(self.d(self.gen(z, dep, al).detach())).mean() + F.softplus(-self.d(b[0])).mean()
        self.update(od, ld)
        lg = F.softplus(-self.d(self.gen(z, dep, al))).mean()
        self.update(og, lg)
        self.keep(ld, lg)


class hook_optimizers(Lit):
    """The tutorial of torch: an optimizer for each parameter steps in the backward pass."""

    def configure_optimizers(self):
        return None

    manual = True

    def on_fit_start(self):
        self.opts = {p: torch.optim.Adam([p], lr=0.01, foreach=False, eps=1e-3) for p in self.parameters()}

        def hook(p):
            self.opts[p].step()
            self.opts[p].zero_grad()

        for p in self.parameters():
            p.register_post_accumulate_grad_hook(hook)

    def training_step(self, b, i):
        loss = F.cross_entropy(self.net(b[0]), b[1])
        self.manual_backward(loss)
        self.keep(loss)


class hook_optimizers_early(hook_optimizers):
    """Hooks at the end of __init__, before sharding, as the tutorial places them."""

    def build(self):
        super().build()
        hook_optimizers.on_fit_start(self)

    def on_fit_start(self):
        pass


class tbptt(Lit):
    manual = True

    def build(self):
        self.rnn = nn.GRU(8, 8, num_layers=2)
        self.out = nn.Linear(8, 3)

    def training_step(self, b, i):
        opt = self.optimizers()
        h = None
        x = b[0].unsqueeze(0).repeat(6, 1, 1)
        for k, c in enumerate(x.split(2)):
            y, h = self.rnn(c + 0.1 * k, h if h is None else h.detach())
            loss = F.cross_entropy(self.out(y[-1]), b[1])
            self.update(opt, loss)
            self.keep(loss)


class tbptt_k1_k2(Lit):
    """albanD's truncated BPTT(k1, k2): states are leaves, and gradients are passed on by hand with retain_graph."""

    manual = True

    def build(self):
        self.cell = nn.ModuleList([Block(8), Block(8)])
        self.inp = nn.Linear(8, 8)
        self.out = nn.Linear(8, 3)

    def training_step(self, b, i):
        opt = self.optimizers()
        states = [(None, torch.zeros(8, 8))]
        for j in range(6):
            s = states[-1][1].detach()
            s.requires_grad = True
            n = torch.tanh(self.inp(b[0] * (1 + 0.1 * j)) + s)
            for k in self.cell:
                n = k(n)
            out = self.out(n)
            states.append((s, n))
            while len(states) > 3:
                del states[0]
            if (j + 1) % 2 == 0:
                loss = F.cross_entropy(out, b[1])
                opt.zero_grad()
                self.manual_backward(loss, retain_graph=True)
                for k in range(2):
                    if states[-k - 2][0] is None:
                        break
                    g = states[-k - 1][0].grad
                    self.manual_backward((states[-k - 2][1] * g).sum(), retain_graph=True) if self.safe else states[
                        -k - 2
                    ][1].backward(g, retain_graph=True)
                opt.step()
                self.keep(loss)
                states = [(None, states[-1][1])]

    safe = True


class tbptt_raw(tbptt_k1_k2):
    safe = False


class reinforce(Lit):
    def build(self):
        self.pi = mlp()
        self.base = nn.Parameter(torch.zeros(1))

    def training_step(self, b, i):
        s, tr = b[0], []
        with torch.no_grad():
            for _ in range(3):
                a = torch.multinomial(self.pi(s).softmax(1), 1)
                r = (a == b[1][:, None]).float()
                tr.append((s, a, r))
                s = torch.tanh(s + a - 1)
        loss = 0
        for s, a, r in tr:
            lp = self.pi(s).log_softmax(1).gather(1, a)
            loss = loss - (lp * (r - self.base.detach())).mean() + (self.base - r).pow(2).mean()
        return self.keep(loss)


class dreamer(Lit):
    """Imagination through a world model that is frozen for the actor's loss (juliusfrost/dreamer-pytorch's FreezeParameters)."""

    manual = True

    def build(self):
        self.world = mlp(11, 8)
        self.rew = mlp(8, 1, n=1)
        self.actor = mlp()
        self.value = mlp(8, 1, n=1)

    def configure_optimizers(self):
        return (
            adam([*self.world.parameters(), *self.rew.parameters()]),
            adam(self.actor.parameters()),
            adam(self.value.parameters()),
        )

    def frozen(self, *ms):
        class Freeze:
            def __init__(s):
                s.ps = [p for m in ms for p in m.parameters()]
                s.was = [p.requires_grad for p in s.ps]

            def __enter__(s):
                for p in s.ps:
                    p.requires_grad = False

            def __exit__(s, *a):
                for p, w in zip(s.ps, s.was):
                    p.requires_grad = w

        return Freeze()

    def training_step(self, b, i):
        ow, oa, ov = self.optimizers()
        x = b[0]
        a = F.one_hot(b[1], 3).float()
        lw = F.mse_loss(self.world(torch.cat([x, a], 1)), x.roll(1, 1)) + F.mse_loss(self.rew(x).squeeze(), x.sum(1))
        with self.frozen(self.world, self.rew):
            s, traj, R = x, [], []
            for _ in range(3):
                s = self.world(torch.cat([s, self.actor(s).softmax(1)], 1))
                traj.append(s)
        with self.frozen(self.world, self.rew, self.value):
            for s in traj:
                R.append(self.rew(s) + 0.9 * self.value(s))
        la = -torch.stack(R).mean()
        lv = torch.stack([F.mse_loss(self.value(s.detach()), r.detach()) for s, r in zip(traj, R)]).mean()
        for o in (ow, oa, ov):
            o.zero_grad()
        self.manual_backward(lw)
        self.manual_backward(la)
        self.manual_backward(lv)
        for o in (ow, oa, ov):
            o.step()
        self.keep(lw, la, lv)


class pinn(Lit):
    """Burgers' equation."""

    def build(self):
        self.u = mlp(2, 1)

    def residual(self, b):
        x, t = b[0][:, :1].requires_grad_(), b[0][:, 1:2].requires_grad_()
        u = self.u(torch.cat([x, t], 1))
        d = lambda y, z: autograd.grad(y, z, torch.ones_like(y), create_graph=True)[0]
        ux, ut = d(u, x), d(u, t)
        return (ut + u * ux - 0.01 * d(ux, x)).pow(2).mean() + (
            self.u(torch.cat([x, torch.zeros_like(t)], 1)) + torch.sin(x)
        ).pow(2).mean()

    def training_step(self, b, i):
        return self.keep(self.residual(b))


class pinn_lbfgs(pinn):
    """L-BFGS with a closure; all ranks take the same points, as docs/optimizers.md says."""

    manual = True

    def build(self):
        self.u = mlp(2, 2, h=8)

    def residual(self, b):
        return super().residual([b[0], b[1]])

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, line_search_fn=None)

    def training_step(self, b, i):
        opt = self.optimizers()
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(i))

        def closure():
            opt.zero_grad()
            loss = self.residual([x, b[1]])
            self.manual_backward(loss)
            self.keep(loss)
            return loss

        opt.step(closure)


class pinn_lbfgs_auto(pinn_lbfgs):
    manual = False

    def training_step(self, b, i):
        return self.keep(self.residual([torch.randn(8, 8, generator=torch.Generator().manual_seed(i)), b[1]]))


class darts(Lit):
    """Second-order DARTS by finite differences: weights are moved by .data inside the step."""

    manual = True

    def build(self):
        self.net = mlp()
        self.alpha = nn.Parameter(torch.zeros(3))

    def f(self, x):
        return self.net(x) * self.alpha.softmax(0) * 3

    def configure_optimizers(self):
        return sgd(self.net.parameters()), sgd([self.alpha])

    def training_step(self, b, i):
        ow, oa = self.optimizers()
        x, y = b
        ps = list(self.net.parameters())
        lv = F.cross_entropy(self.f(x[4:]), y[4:])
        ga, *gw = autograd.grad(lv, [self.alpha, *ps])
        eps = 0.01 / torch.cat([g.flatten() for g in gw]).norm()
        got = []
        for s in (1, -2):
            for p, g in zip(ps, gw):
                p.data.add_(g, alpha=float(s * eps)) if not self.same else p.data.add_(g * (s * eps))
            got.append(autograd.grad(F.cross_entropy(self.f(x[:4]), y[:4]), self.alpha)[0])
        for p, g in zip(ps, gw):
            p.data.add_(g * eps)
        ga = ga - 0.05 * (got[0] - got[1]) / (2 * eps)
        self.update(oa, (self.alpha * ga.detach()).sum())
        lt = F.cross_entropy(self.f(x[:4]), y[:4])
        self.update(ow, lt)
        self.keep(lv, lt)

    same = True


class ewc(Lit):
    """A penalty over all parameters in the step."""

    def build(self):
        self.net = mlp()
        self.old = [p.detach().clone() for p in self.net.parameters()]

    def training_step(self, b, i):
        return self.keep(
            F.cross_entropy(self.net(b[0]), b[1])
            + 0.1 * sum((p - o).pow(2).sum() for p, o in zip(self.net.parameters(), self.old))
        )


class l1_reg(Lit):
    def training_step(self, b, i):
        return self.keep(F.cross_entropy(self.net(b[0]), b[1]) + 0.01 * sum(p.abs().sum() for p in self.parameters()))


class l1_reg_none(l1_reg):
    options = {"auto_wrap_policy": None}


class ewc_none(ewc):
    options = {"auto_wrap_policy": None}


class uncertainty_weights(Lit):
    def build(self):
        self.net = mlp(8, 4)
        self.logvar = nn.Parameter(torch.zeros(2))

    def training_step(self, b, i):
        o = self.net(b[0])
        ls = torch.stack([F.cross_entropy(o[:, :3], b[1]), (o[:, 3] - b[0].sum(1)).pow(2).mean()])
        return self.keep((torch.exp(-self.logvar) * ls + self.logvar).sum())


class condensation(Lit):
    """Dataset condensation by matching gradients: synthetic inputs are trained through gradients of parameters."""

    def build(self):
        self.net = mlp(n=2).requires_grad_(True)
        self.syn = nn.Parameter(torch.randn(3, 8))

    def training_step(self, b, i):
        ps = list(self.net.parameters())
        gr = autograd.grad(F.cross_entropy(self.net(b[0]), b[1]), ps)
        gs = autograd.grad(F.cross_entropy(self.net(self.syn), torch.arange(3)), ps, create_graph=True)
        return self.keep(sum((1 - F.cosine_similarity(a.detach().flatten(), c.flatten(), 0)) for a, c in zip(gr, gs)))

    def configure_optimizers(self):
        return sgd([self.syn])


class double_gp_two_nets(Lit):
    """One optimizer, R1 of a critic in the same loss as the generator's through it: automatic optimization."""

    def build(self):
        self.a, self.d = mlp(8, 8), mlp(8, 1)

    def training_step(self, b, i):
        x = self.a(b[0])
        y = self.d(x)
        (g,) = autograd.grad(y.sum(), x, create_graph=True)
        return self.keep(y.pow(2).mean() + g.pow(2).sum(1).mean())


class meta_pseudo_labels(Lit):
    manual = True

    def build(self):
        self.t, self.s = mlp(), mlp()

    def configure_optimizers(self):
        return sgd(self.t.parameters()), sgd(self.s.parameters())

    def training_step(self, b, i):
        ot, os_ = self.optimizers()
        x, y = b
        t = self.t(x)
        hard = t.argmax(1).detach()
        s = self.s(x)
        sl = F.cross_entropy(self.s(x), y).detach()
        ls = F.cross_entropy(s, hard)
        self.update(os_, ls)
        with torch.no_grad():
            dot = sl - F.cross_entropy(self.s(x), y)
        lt = F.cross_entropy(t, y) + dot * F.cross_entropy(t, hard)
        self.update(ot, lt)
        self.keep(ls, lt)


class trpo(Lit):
    """A natural gradient: Fisher-vector products over the parameters, and parameters that are set."""

    manual = True
    options = {"auto_wrap_policy": None}

    def build(self):
        self.pi = mlp(n=1)

    def training_step(self, b, i):
        opt = self.optimizers()
        ps = list(self.pi.parameters())
        lp = self.pi(b[0]).log_softmax(1)
        loss = F.nll_loss(lp, b[1])
        flat = lambda gs: torch.cat([g.reshape(-1) for g in gs])
        g = flat(autograd.grad(loss, ps, retain_graph=True))
        kl = (lp.exp().detach() * (lp.detach() - lp)).sum(1).mean()
        gk = flat(autograd.grad(kl, ps, create_graph=True))
        v, r, p = torch.zeros_like(g), g.clone(), g.clone()
        rr = r @ r
        for _ in range(3):
            Ap = flat(autograd.grad(gk @ p, ps, retain_graph=True)).detach() + 0.1 * p
            al = rr / (p @ Ap)
            v += al * p
            r -= al * Ap
            nr = r @ r
            p = r + nr / rr * p
            rr = nr
        v = self.agree(v)
        k = 0
        for q in ps:
            q.data.copy_((q.data.view(-1) - 0.1 * v[k : k + q.numel()]).view_as(q))
            k += q.numel()
        self.keep(loss)

    def agree(self, v):  # every rank must write the same
        import torch.distributed as dist

        dist.all_reduce(v)
        return v / 2


class galore_like(Lit):
    """Perturbed gradients in on_after_backward, as noise for privacy or gradient centralisation has them."""

    def on_after_backward(self):
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


class perceptual(Lit):
    """Features of a frozen net, caught by hooks of its layers, and a style loss."""

    def build(self):
        self.vgg = mlp().eval().requires_grad_(False)
        self.net = mlp(8, 8)
        self.f = {}
        for k, blk in enumerate(self.vgg.blocks):
            blk.register_forward_hook(lambda m, a, o, k=k: self.f.__setitem__(k, o))

    def training_step(self, b, i):
        self.vgg(b[0])
        want = [v.detach() for v in self.f.values()]
        self.vgg(self.net(b[0]))
        return self.keep(sum(F.mse_loss(v, w) for v, w in zip(self.f.values(), want)))

    def configure_optimizers(self):
        return sgd(self.net.parameters())


class lookahead_bilevel(Lit):
    """Learned reweighting (Ren et al.): a virtual step of the weights, differentiated."""

    options = {"auto_wrap_policy": None}

    def training_step(self, b, i):
        x, y = b
        w = dict(self.net.named_parameters())
        eps = torch.zeros(8, requires_grad=True)
        cost = (F.cross_entropy(torch.func.functional_call(self.net, w, (x,)), y, reduction="none") * eps).sum()
        g = autograd.grad(cost, list(w.values()), create_graph=True)
        v = {k: p - 0.1 * d for (k, p), d in zip(w.items(), g)}
        (ge,) = autograd.grad(F.cross_entropy(torch.func.functional_call(self.net, v, (x[:3],)), y[:3]), eps)
        wt = (-ge).clamp(min=0)
        wt = wt / wt.sum().clamp(min=1e-6)
        return self.keep((F.cross_entropy(self.net(x), y, reduction="none") * wt.detach()).sum())


class madry_pgd(Lit):
    """Madry's PGD in eval mode, before the step's own pass."""

    def build(self):
        self.net = mlp(drop=0.2)

    def training_step(self, b, i):
        self.net.eval()
        x = b[0] + torch.empty_like(b[0]).uniform_(-0.1, 0.1)
        for _ in range(3):
            x.requires_grad_()
            with torch.enable_grad():
                loss = F.cross_entropy(self.net(x), b[1], reduction="sum")
            (g,) = autograd.grad(loss, [x])
            x = torch.min(torch.max(x.detach() + 0.05 * g.sign(), b[0] - 0.1), b[0] + 0.1)
        self.net.train()
        return self.keep(F.cross_entropy(self.net(x), b[1]))


class free_at(Lit):
    """Free adversarial training: one backward pass gives the weights' and the input's gradients; noise persists."""

    manual = True

    def build(self):
        self.net = mlp()
        self.noise = torch.zeros(8, 8)

    def training_step(self, b, i):
        opt = self.optimizers()
        for _ in range(3):
            n = self.noise.clone().requires_grad_()
            loss = F.cross_entropy(self.net(b[0] + n), b[1])
            opt.zero_grad()
            self.manual_backward(loss)
            self.noise = (self.noise + 0.1 * n.grad.sign()).clamp(-0.2, 0.2)
            opt.step()
            self.keep(loss)


class dqn(Lit):
    """The tutorial of torch: the target network gets the other's state_dict() in the step."""

    def build(self):
        self.net = mlp()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, b, i):
        if i % 2 == 0:
            self.target.load_state_dict(self.net.state_dict())
            self.keep(self.target.inp.weight.sum())
        with torch.no_grad():
            value = 0.9 * self.target(b[0].roll(1, 0)).max(1).values + b[1]
        return self.keep(F.smooth_l1_loss(self.net(b[0]).gather(1, b[1][:, None])[:, 0], value))

    def configure_optimizers(self):
        return sgd(self.net.parameters())


class mezo(Lit):
    """Two forward passes with moved weights, and no backward pass; weights are assigned at the end of the step."""

    manual = True

    def training_step(self, b, i):
        parameters = [p for group in self.optimizers().param_groups for p in group["params"]]
        directions = [torch.cos(37 * p.detach()) for p in parameters]
        with torch.no_grad():
            for scale in (0.01, -0.02):
                for p, direction in zip(parameters, directions):
                    p.data = p.data + scale * direction
                self.keep(F.cross_entropy(self.net(b[0]), b[1]))
            for p, direction in zip(parameters, directions):
                p.data = p.data + 0.03 * direction


class norm_at_start(Lit):
    """A norm of all weights is read in a hook before the first step."""

    def on_fit_start(self):
        self.read_norm()

    def read_norm(self):
        self.keep(sum(float(p.detach().norm()) for p in self.parameters()))


class norm_before_backward(norm_at_start):
    def on_fit_start(self):
        pass

    def on_before_backward(self, loss):
        self.read_norm()


class norm_before_zero_grad(norm_at_start):
    def on_fit_start(self):
        pass

    def on_before_zero_grad(self, optimizer):
        self.read_norm()


class decayed_gradients(Lit):
    """Gradients of earlier steps are scaled where others forget them: between the training step and its backward pass."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


class matrices_at_start(Lit):
    """Matrices, and no vectors, get other values in hooks before the first step."""

    def on_fit_start(self):
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.constant_(p, 0.05)

    def on_train_start(self):
        with torch.no_grad():
            for p in self.parameters():
                if p.dim() == 1:
                    p.mul_(0.5)


class untied(Lit):
    """Weights that are tied are parted between two steps."""

    def build(self):
        self.net = mlp(8, 8)
        self.net.out.weight = self.net.inp.weight

    def on_train_batch_start(self, b, i):
        super().on_train_batch_start(b, i)
        if i == 1:
            self.net.out.weight = nn.Parameter(self.net.inp.weight.detach().clone())


ALL = {
    name: value
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, Lit) and value not in (Lit, Adversaries)
}
