"""Models whose tensors have roles: LoRA mixtures on language models, classifiers, pools."""
