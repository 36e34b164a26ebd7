// How long after SIGKILL a process with queued GPU work is gone, by what it had set up. usage: kill_probe
#include <cuda.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <string>
#include <chrono>
#include <thread>
#include <unistd.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
using clk = std::chrono::steady_clock;
static double ms(clk::time_point a){return std::chrono::duration<double,std::milli>(clk::now()-a).count();}
#define CK(x) do{CUresult r_=(x); if(r_){const char*s="?";cuGetErrorName(r_,&s);printf("FAIL %s %s\n",#x,s);fflush(stdout);_exit(3);}}while(0)
__global__ void spin(volatile unsigned*p,unsigned long long c){unsigned long long t=clock64();while(clock64()-t<c){}if(p)p[0]=1;}
struct V{const char*name;const char*conn;size_t window;bool reg;int work;bool thread;int streams;};
static void child(const V&v,int s){
  setenv("CUDA_DEVICE_MAX_CONNECTIONS",v.conn,1);
  CK(cuInit(0));CUdevice d;CK(cuDeviceGet(&d,0));CUcontext c;CK(cuDevicePrimaryCtxRetain(&c,d));CK(cuCtxSetCurrent(c));
  size_t len=8ull<<30,win=v.window?v.window:len;CUdeviceptr va;CK(cuMemAddressReserve(&va,win,0,0,0));
  CUmemAllocationProp p{};p.type=CU_MEM_ALLOCATION_TYPE_PINNED;p.location.type=CU_MEM_LOCATION_TYPE_DEVICE;p.requestedHandleTypes=CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  for(int i=0;i<8;i++){CUmemGenericAllocationHandle h;CK(cuMemCreate(&h,1ull<<30,&p,0));CK(cuMemMap(va+i*(1ull<<30),1ull<<30,0,h,0));CK(cuMemRelease(h));}
  CUmemAccessDesc a{};a.location.type=CU_MEM_LOCATION_TYPE_DEVICE;a.flags=CU_MEM_ACCESS_FLAGS_PROT_READWRITE;CK(cuMemSetAccess(va,len,&a,1));
  if(v.reg){int fd=syscall(SYS_memfd_create,"x",0);ftruncate(fd,64<<20);void*m=mmap(0,64<<20,PROT_READ|PROT_WRITE,MAP_SHARED,fd,0);CK(cuMemHostRegister(m,512<<10,CU_MEMHOSTREGISTER_PORTABLE|CU_MEMHOSTREGISTER_DEVICEMAP));}
  if(v.thread)for(int i=0;i<2;i++)std::thread([]{pause();}).detach();
  std::vector<CUstream>st(v.streams);for(auto&x:st)CK(cuStreamCreate(&x,CU_STREAM_NON_BLOCKING));
  if(v.work==1)for(int i=0;i<2000;i++)CK(cuMemsetD8Async(va,i,len,st[i%v.streams]));
  if(v.work==2)spin<<<1,32,0,st[0]>>>((volatile unsigned*)va,40000000000ull);
  if(v.work==3)for(int i=0;i<100;i++)CK(cuMemsetD8Async(va,i,len,st[i%v.streams]));
  char k='g';write(s,&k,1);pause();_exit(0);}
int main(){setvbuf(stdout,0,_IOLBF,0);
  V vs[]={{"base: own 8 GiB window, spin kernel","8",0,false,2,false,1},{"memset queue 2000","8",0,false,1,false,1},{"memset queue 100","8",0,false,3,false,1},{"idle","8",0,false,0,false,1},
  {"idle, 32 queues","32",0,false,0,false,1},{"spin, 32 queues","32",0,false,2,false,1},{"memset 2000, 32 queues","32",0,false,1,false,1},{"idle, 280 GiB window","8",280ull<<30,false,0,false,1},
  {"spin, 280 GiB window","8",280ull<<30,false,2,false,1},{"spin, registered memory","8",0,true,2,false,1},{"spin, threads","8",0,false,2,true,1},{"memset 2000, all","32",280ull<<30,true,1,true,1},{"spin, all","32",280ull<<30,true,2,true,1},{"memset 2000 on 8 streams","8",0,false,1,false,8}};
  for(auto&v:vs)for(int r=0;r<2;r++){int sv[2];socketpair(AF_UNIX,SOCK_STREAM,0,sv);pid_t c=fork();if(!c){close(sv[0]);child(v,sv[1]);}close(sv[1]);char k;if(read(sv[0],&k,1)!=1){printf("%s: child failed\n",v.name);continue;}
    usleep(50000);int pf=syscall(SYS_pidfd_open,c,0);auto t=clk::now();kill(c,SIGKILL);double pm=-1,sm=-1;
    while((pm<0||sm<0)&&ms(t)<5000){pollfd f[2]={{pf,POLLIN,0},{sv[0],POLLIN,0}};poll(f,2,1);if(pm<0&&f[0].revents)pm=ms(t);if(sm<0&&f[1].revents)sm=ms(t);if(pm>=0&&sm<0)usleep(100);}
    waitpid(c,0,0);printf("%-45s pidfd %7.1f ms  socket %7.1f ms\n",v.name,pm,sm);close(sv[0]);close(pf);}
  return 0;}
