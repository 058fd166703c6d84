"""What answers the turns of a policy: tools, in worker processes that can be killed."""
