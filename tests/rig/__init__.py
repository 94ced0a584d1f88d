"""A training run on CPU, without Ray: the real trainer, loader and agl-server, stand-ins for workers and agents.

    settings.py   what a run looks like, and the framework config made from it
    server.py     the real agl-server app in a thread
    agents.py     controller and agents, played in the server's event loop
    bare.py       objects of agent-lightning with nothing but what a test gives them
    standins.py   worker groups, weight sync, model servers, tokenizer
    life.py       one life of a run, up to its end or a chosen death
    record.py     what happened in it
    runs.py       several lives, the uninterrupted truth, comparison
    child.py      a life in a process of its own, which can be killed
    nursery.py    a process that has imported the frameworks once and forks a child for each life
    kill_campaign.py  lives killed at random moments, many times, and resumed until done
    processes.py  starting processes that end with the tests

Imports of the frameworks stay inside functions: a forked child and a listing of the tests start without them.
"""
