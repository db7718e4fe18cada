"""An agent learns to heat rooms. Each room belongs to an observer on another rank. The agent has the policy."""

import os

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.distributed.rpc import RRef, remote, rpc_async, rpc_sync

AGENT, OBSERVER = "agent", "observer{}"
STEPS = 8


def _call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def _remote_method(method, rref, *args, **kwargs):
    return rpc_sync(rref.owner(), _call_method, args=[method, rref, *args], kwargs=kwargs)


class Observer:
    """An observer with a room that cools down by one degree in each step. The agent heats it by 0, 1 or 2."""

    def __init__(self):
        self.id = rpc.get_worker_info().id
        self.chance = torch.Generator().manual_seed(self.id)

    def run_episode(self, agent_rref):
        degrees = 18 + 4 * torch.rand(1, generator=self.chance).item()
        for _ in range(STEPS):
            action = _remote_method(Agent.select_action, agent_rref, self.id, torch.tensor([degrees - 20, 1.0]))
            degrees += action - 1 + 0.1 * torch.randn(1, generator=self.chance).item()
            _remote_method(Agent.report_reward, agent_rref, self.id, -abs(degrees - 20))
        print(degrees.hex())


class Agent:
    def __init__(self, world_size):
        torch.manual_seed(1)
        self.policy = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.02)
        self.agent_rref = RRef(self)
        self.observers = [remote(OBSERVER.format(rank), Observer) for rank in range(1, world_size)]
        ids = [observer.owner().id for observer in self.observers]
        self.chance = {id: torch.Generator().manual_seed(10 + id) for id in ids}
        self.seen, self.rewards = {id: [] for id in ids}, {id: [] for id in ids}

    def select_action(self, id, state):
        with torch.no_grad():
            chosen = torch.multinomial(self.policy(state).softmax(0), 1, generator=self.chance[id]).item()
        self.seen[id].append((state, chosen))
        return chosen

    def report_reward(self, id, reward):
        self.rewards[id].append(reward)

    def run_episode(self):
        futures = []
        for observer in self.observers:
            args = (Observer.run_episode, observer, self.agent_rref)
            futures.append(rpc_async(observer.owner(), _call_method, args=args))
        for future in futures:
            future.wait()

    def finish_episode(self):
        states, actions = zip(*(pair for seen in self.seen.values() for pair in seen), strict=True)
        rewards = torch.tensor([reward for rewards in self.rewards.values() for reward in rewards])
        returns = rewards.view(-1, STEPS).flip(1).cumsum(1).flip(1).flatten()
        chances = self.policy(torch.stack(states)).log_softmax(1)[range(len(actions)), actions]
        loss = -(chances * (returns - returns.mean()) / returns.std()).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for of_one in (*self.seen.values(), *self.rewards.values()):
            of_one.clear()
        return loss.item(), rewards.sum().item()


def run_worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
    if rank == 0:
        rpc.init_rpc(AGENT, rank=rank, world_size=world_size)
        agent = Agent(world_size)
        for _ in range(3):
            agent.run_episode()
            print(*(figure.hex() for figure in agent.finish_episode()))
    else:
        rpc.init_rpc(OBSERVER.format(rank), rank=rank, world_size=world_size)
    rpc.shutdown()


if __name__ == "__main__":
    world_size = 3
    mp.spawn(run_worker, args=(world_size,), nprocs=world_size)
