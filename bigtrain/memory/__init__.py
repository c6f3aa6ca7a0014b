"""Host memory: where it comes from, and how it is filled.

heap       fresh pages in one call, freed ones returned to the system
pinned     page-locked, of exactly the size asked for
pastcache  large copies at the memory's speed
"""
