"""Scenes on real processes: agl-server, agl-controller and its agents, and trainers that are killed with SIGKILL.

    stage.py      one scene: its folder, services, lives, and the questions that a test asks afterwards
    services.py   agl-server and agl-controller (local mode) as processes
    agent.py      what the controller starts for a rollout; it follows the scene's plan and gates
    chat.py       a tiny chat server, the policy: inside the trainer, or a process of its own
    meddler.py    a proxy before agl-server that answers wrongly
    trainer.py    the real trainer, recording; only GPU workers are stand-ins
    account.py    what happened over all lives, and whether it adds up

A scene is steered by files in its folder. `plan.json` tells each agent what to do, step by step; a move `gate:NAME`
waits until the file `gates/NAME` exists. So an agent stands exactly where the test wants it, however slow the machine.
"""
