"""Problem 8.4: the share of time that saves and failures cost."""


def lost_share(interval_s: float, save_s: float, failure_s: float) -> float:
    """Return the share of time that is lost.

    interval_s  seconds between two saves
    save_s      seconds by which a save delays training
    failure_s   mean seconds between two failures; each loses half an interval on average
    """
    raise NotImplementedError
