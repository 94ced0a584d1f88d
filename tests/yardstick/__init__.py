"""The yardstick: a scene with the trainer alone, with the extension, and killed and resumed, compared row by row.

scene.py     a scene, its three runs, and what is compared
campaign.py  scenes drawn from a seed
test_*.py    scenes by kind: each is small, and was once trained differently, refused or ended by the extension
"""
