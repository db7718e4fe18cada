"""What runs before torch's own operators.

kernel       notes a call, may refuse it or have it checked, and goes on
gloo_on_gpu  what gloo cannot do with a GPU's tensors, refused before it ends the process
repeats      the short way of calls that a training loop makes again in each step
"""
