"""Models whose tensors have roles: LoRA mixtures on causal language models, classifiers of images
and texts, pools of experts.
"""
