"""The lock that the engines of a process share: re-entrant, and in the order of the requests."""

import threading
import time

from ed_esurge.engine.transport import FairLock


def test_waiting_threads_receive_the_lock_in_order_before_the_owner_has_it_again():
    lock, order, threads = FairLock(), [], []

    def take(number: int) -> None:
        with lock, lock:  # re-entrant
            order.append(number)

    with lock:
        for number in range(5):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            while len(lock._waiting) <= number:
                time.sleep(0.001)
    with lock:
        order.append("owner")
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4, "owner"]
