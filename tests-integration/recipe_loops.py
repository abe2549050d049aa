"""Recipes of recipes.py as loops of Fabric, as a script is translated: each module is set up, and backward is fabric.backward."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import autograd, nn

from recipes import Reverse, adam, bce, mlp, sgd


def pair(f, net, opt=sgd):
    return f.setup(net, opt(net.parameters()))


def update(f, optimizer, loss):
    optimizer.zero_grad()
    f.backward(loss)
    optimizer.step()


def gan(f, data, keep, clear=lambda net, optimizer: optimizer.zero_grad()):
    (G, og), (D, od) = pair(f, mlp(4, 8), adam), pair(f, mlp(8, 1), adam)
    for i, x, y in data():
        clear(D, od)
        l1 = bce(D(x).view(-1), torch.ones(8))
        f.backward(l1)
        fake = G(torch.randn(8, 4))
        l2 = bce(D(fake.detach()).view(-1), torch.zeros(8))
        f.backward(l2)
        od.step()
        clear(G, og)
        lg = bce(D(fake).view(-1), torch.ones(8))
        f.backward(lg)
        og.step()
        keep(l1, l2, lg)
    return G, D


def gan_module_zero_grad(f, data, keep):
    return gan(f, data, keep, clear=lambda net, optimizer: net.zero_grad())


def wgan_gp(f, data, keep):
    (G, og), (D, od) = pair(f, mlp(4, 8), adam), pair(f, mlp(8, 1), adam)
    for i, x, y in data():
        for _ in range(2):
            fake = G(torch.randn(8, 4)).detach()
            a = torch.rand(8, 1)
            inter = (a * x + (1 - a) * fake).requires_grad_()
            out = D(inter)
            g = autograd.grad(out, inter, torch.ones_like(out), create_graph=True)[0]
            ld = D(fake).mean() - D(x).mean() + 10 * ((g.norm(2, 1) - 1) ** 2).mean()
            update(f, od, ld)
        lg = -D(G(torch.randn(8, 4))).mean()
        update(f, og, lg)
        keep(ld, lg)
    return G, D


def wgan_clip(f, data, keep):
    (G, og), (D, od) = pair(f, mlp(4, 8)), pair(f, mlp(8, 1))
    for i, x, y in data():
        for p in D.parameters():
            p.requires_grad = True
        for p in D.parameters():
            p.data.clamp_(-0.1, 0.1)
        ld = D(G(torch.randn(8, 4)).detach()).mean() - D(x).mean()
        update(f, od, ld)
        for p in D.parameters():
            p.requires_grad = False
        lg = -D(G(torch.randn(8, 4))).mean()
        update(f, og, lg)
        keep(ld, lg)
    return G, D


def r1_lazy(f, data, keep):
    (G, og), (D, od) = pair(f, mlp(4, 8)), pair(f, mlp(8, 1))
    for i, x, y in data():
        ld = F.softplus(D(G(torch.randn(8, 4)).detach())).mean() + F.softplus(-D(x)).mean()
        update(f, od, ld)
        if i % 2 == 0:
            x.requires_grad = True
            p = D(x)
            (g,) = autograd.grad(p.sum(), x, create_graph=True)
            r = g.pow(2).sum(1).mean()
            od.zero_grad()
            f.backward(r + 0 * p[0, 0])
            od.step()
            keep(r)
        lg = F.softplus(-D(G(torch.randn(8, 4)))).mean()
        update(f, og, lg)
        keep(ld, lg)
    return G, D


def freelb(f, data, keep):
    net, o = pair(f, mlp())
    for i, x, y in data():
        d = torch.zeros(8, 8).uniform_(-0.1, 0.1)
        o.zero_grad()
        for _ in range(3):
            d.requires_grad_()
            l = F.cross_entropy(net(x + d), y) / 3
            f.backward(l)
            keep(l)
            d = (d + 0.1 * d.grad.sign()).detach()
        f.clip_gradients(net, o, max_norm=1.0)
        o.step()
    return net


def ppo(f, data, keep):
    pol, val = mlp(), mlp(8, 1)
    ref = copy.deepcopy(pol).requires_grad_(False)
    pol, op = pair(f, pol, adam)
    val, ov = pair(f, val, adam)
    ref = f.setup_module(ref)
    for i, x, y in data():
        with torch.no_grad():
            lp = pol(x).log_softmax(-1)
            a = torch.multinomial(lp.exp(), 1)
            old = lp.gather(1, a)
            r = (a == y[:, None]).float() - 0.1 * (old - ref(x).log_softmax(-1).gather(1, a))
            adv = r - val(x)
        for _ in range(2):
            rat = (pol(x).log_softmax(-1).gather(1, a) - old).exp()
            pg = -torch.min(adv * rat, adv * rat.clamp(0.8, 1.2)).mean()
            vl = (val(x) - r).pow(2).mean()
            op.zero_grad()
            ov.zero_grad()
            f.backward(pg + 0.5 * vl)
            op.step()
            ov.step()
            keep(pg, vl)
    return pol, val, ref


def mean_teacher(f, data, keep):
    s = mlp()
    t = copy.deepcopy(s).requires_grad_(False)
    s, o = pair(f, s)
    t = f.setup_module(t)
    for i, x, y in data():
        with torch.no_grad():
            tt = t(x + 0.1 * torch.randn_like(x)).softmax(1)
        out = s(x)
        l = keep(F.cross_entropy(out, y) + F.mse_loss(out.softmax(1), tt))
        update(f, o, l)
        with torch.no_grad():
            for p, q in zip(t.parameters(), s.parameters()):
                p.mul_(0.9).add_(q, alpha=0.1)
    return s, t


def moco(f, data, keep):
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.q = mlp()
            s.k = copy.deepcopy(s.q).requires_grad_(False)
            s.register_buffer("queue", F.normalize(torch.randn(3, 32), dim=0))
            s.ptr = 0

        def forward(s, x):
            q = F.normalize(s.q(x), dim=1)
            with torch.no_grad():
                for a, c in zip(s.q.parameters(), s.k.parameters()):
                    c.mul_(0.9).add_(a, alpha=0.1)
                k = F.normalize(s.k(x + 0.1), dim=1)
            lo = torch.cat([(q * k).sum(1, keepdim=True), q @ s.queue.clone().detach()], 1) / 0.2
            s.queue[:, s.ptr : s.ptr + 8] = k.T
            s.ptr = (s.ptr + 8) % 32
            return lo

    m = M()
    m, o = f.setup(m, sgd(m.q.parameters()))
    for i, x, y in data():
        l = keep(F.cross_entropy(m(x), torch.zeros(8).long()))
        update(f, o, l)
    return m


def hnn(f, data, keep):
    class H(nn.Module):
        def __init__(s):
            super().__init__()
            s.h = mlp(8, 1)

        def forward(s, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return autograd.grad(s.h(x).sum(), x, create_graph=True)[0].roll(4, 1)

    net, o = pair(f, H())
    for i, x, y in data():
        l = keep(F.mse_loss(net(x), x.roll(1, 1)))
        update(f, o, l)
        with torch.no_grad():
            keep(net(x).sum())
    return net


def deq(f, data, keep):
    class D(nn.Module):
        def __init__(s):
            super().__init__()
            s.i = nn.Linear(8, 8)
            s.f1 = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
            s.o = nn.Linear(8, 3)

        def forward(s, inp):
            x = s.i(inp)
            fn = lambda z: 0.4 * s.f1(0.4 * z) + x
            z = torch.zeros_like(x)
            with torch.no_grad():
                for _ in range(15):
                    z = fn(z)
            z = fn(z)
            z0 = z.detach().requires_grad_()
            f0 = fn(z0)

            def hook(g):
                y = torch.zeros_like(g)
                for _ in range(15):
                    y = autograd.grad(f0, z0, y, retain_graph=True)[0] + g
                return y

            if z.requires_grad:
                z.register_hook(hook)
            return s.o(z)

    net, o = pair(f, D())
    for i, x, y in data():
        l = keep(F.cross_entropy(net(x), y))
        update(f, o, l)
    return net


def tbptt(f, data, keep):
    class R(nn.Module):
        def __init__(s):
            super().__init__()
            s.rnn = nn.GRU(8, 8, 2)
            s.o = nn.Linear(8, 3)

        def forward(s, x, h):
            y, h = s.rnn(x, h)
            return s.o(y[-1]), h

    net, o = pair(f, R())
    for i, x, y in data():
        h = torch.zeros(2, 8, 8)
        for k in range(3):
            out, h = net(x[None] + 0.1 * k, h.detach())
            l = keep(F.cross_entropy(out, y))
            update(f, o, l)
    return net


def dreamer(f, data, keep):
    (W, ow), (A, oa) = pair(f, mlp(11, 8), adam), pair(f, mlp(), adam)
    for i, x, y in data():
        lw = F.mse_loss(W(torch.cat([x, F.one_hot(y, 3).float()], 1)), x.roll(1, 1))
        update(f, ow, lw)
        for p in W.parameters():
            p.requires_grad = False
        s = x
        R = 0
        for _ in range(3):
            s = W(torch.cat([s, A(s).softmax(1)], 1))
            R = R + s.mean()
        update(f, oa, -R)
        for p in W.parameters():
            p.requires_grad = True
        keep(lw, R)
    return W, A


def ebm(f, data, keep):
    net, o = pair(f, mlp(8, 1))
    for i, x, y in data():
        z = torch.rand(8, 8) * 2 - 1
        for _ in range(3):
            z.requires_grad_()
            (g,) = autograd.grad(net(z).sum(), z)
            z = (z.detach() - 0.5 * g + 0.01 * torch.randn_like(z)).clamp(-1, 1)
        e, n = net(torch.cat([x, z])).chunk(2)
        l = keep(e.mean() - n.mean() + 0.1 * (e**2 + n**2).mean())
        update(f, o, l)
    return net


def maml_whole(f, data, keep):
    """Calls of torch.func.functional_call inside forward()."""

    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.net = mlp(n=1)

        def forward(s, x, y):
            w = dict(s.net.named_parameters())
            for _ in range(2):
                g = autograd.grad(
                    F.cross_entropy(torch.func.functional_call(s.net, w, (x[:4],)), y[:4]),
                    list(w.values()),
                    create_graph=True,
                )
                w = {k: p - 0.1 * d for (k, p), d in zip(w.items(), g)}
            return F.cross_entropy(torch.func.functional_call(s.net, w, (x[4:],)), y[4:])

    net, o = pair(f, M())
    for i, x, y in data():
        l = keep(net(x, y))
        update(f, o, l)
    return net


maml_whole.options = {"auto_wrap_policy": None}


def dann(f, data, keep):
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.f, s.c, s.d = mlp(8, 8), nn.Linear(8, 3), mlp(8, 2, n=1)

        def forward(s, x, a):
            h = s.f(x)
            return s.c(h), s.d(Reverse.apply(h, a))

    net, o = pair(f, M())
    for i, x, y in data():
        c, d = net(x, 0.5)
        _, e = net(x * 2 + 1, 0.5)
        l = keep(F.cross_entropy(c, y) + F.cross_entropy(d, y * 0) + F.cross_entropy(e, y * 0 + 1))
        update(f, o, l)
    return net


def tent(f, data, keep):
    net, o = pair(f, mlp())
    for i, x, y in data():
        l = F.cross_entropy(net(x), y)
        update(f, o, l)
        net.eval()
        for _ in range(2):
            out = net(x + 1)
            e = -(out.softmax(1) * out.log_softmax(1)).sum(1).mean()
            update(f, o, e)
            keep(e)
        net.train()
        keep(l, F.cross_entropy(net(x), y))
    return net


def hook_optimizers(f, data, keep):
    m = mlp()
    net = f.setup_module(m)
    opts = {p: torch.optim.Adam([p], lr=0.01, foreach=False, eps=1e-3) for p in net.parameters()}

    def hook(p):
        opts[p].step()
        opts[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for i, x, y in data():
        l = keep(F.cross_entropy(net(x), y))
        f.backward(l)
    return net


def pcgrad(f, data, keep):
    net, o = pair(f, mlp())
    for i, x, y in data():
        out = net(x)
        ls = [F.cross_entropy(out, y), (out.sum(1) - x.sum(1)).pow(2).mean()]
        gs = []
        for l in ls:
            o.zero_grad()
            f.backward(l, retain_graph=True)
            gs.append([p.grad.clone() for p in net.parameters()])
        d = sum((a * c).sum() for a, c in zip(*gs))
        d = d.full_tensor() if hasattr(d, "full_tensor") else d
        for p, a, c in zip(net.parameters(), *gs):
            p.grad = a + c - (d * (a + c) * 0.01 if d < 0 else 0)
        o.step()
        keep(*ls)
    return net


def ac_penalty(f, data, keep):
    from torch.utils.checkpoint import checkpoint

    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.n = mlp(8, 1)

        def forward(s, x):
            h = torch.tanh(s.n.inp(x))
            for b in s.n.blocks:
                h = checkpoint(b, h, use_reentrant=False)
            return s.n.out(h)

    net, o = pair(f, M())
    for i, x, y in data():
        x.requires_grad_()
        out = net(x)
        (g,) = autograd.grad(out.sum(), x, create_graph=True)
        l = keep(out.pow(2).mean() + (g.norm(dim=1) - 1).pow(2).mean())
        update(f, o, l)
    return net


ALL = {
    name: value
    for name, value in globals().items()
    if getattr(value, "__module__", "") == __name__ and not isinstance(value, type) and name not in ("pair", "update")
}
