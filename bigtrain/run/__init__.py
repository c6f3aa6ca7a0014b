"""What a run of launch/train.py is, beside its loop (`bigtrain.train`): from what it is told to what it leaves behind.

arguments, argument_problems, foreign  flags; values that cannot be; flags of other trainers
auto, search                           the ds_config that fits best; the run's arguments with it
capacity, disk                         whether this run fits cards and hosts; whether what it writes fits the disk
left_open, leaf_blocks                 what the plan decides where nobody said; whether the blocks are leaf modules
job                                    from arguments to resolved ds_config, tokenizer, rows, step plan, model
preflight, sameness                    is this machine fit to run; is everything the same on all hosts
runfolder, saving, restart             the output folder; what is kept of what is saved; a job that its launcher starts again
failure, shortage                      who says what when it fails; out of memory, explained
"""
