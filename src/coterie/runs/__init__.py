"""From a recipe to its result: what is asked (`recipes`), what is loaded (`problems`), the loop,
devices, and tuning.
"""
