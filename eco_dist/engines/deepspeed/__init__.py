"""DeepSpeed ZeRO 1, 2 and 3: an optimizer partition is codes, scales and moments; codes travel, one byte a parameter.

Importing this package changes nothing; `install.install()` does, and `import eco_dist.deepspeed` calls it. Modules are
imported one by one: those of the fallback must work where DeepSpeed's inside has changed.
"""
